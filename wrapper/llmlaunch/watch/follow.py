"""`--follow`: why runs wait, what happens to them, and their steps or log lines, until they have ended."""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

from llmlaunch.causes.log_scan import read_log
from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.launchers.logs import JOB, JobLogs, LogLine
from llmlaunch.launchers.run_files import attempt_names, can_be_cancelled, run_name
from llmlaunch.launchers.run_status import RunStatus
from llmlaunch.report.run_text import (
    attempt_began,
    attempt_ended,
    attempt_hangs,
    attempt_loss,
    attempt_stopping,
    waiting_text,
)
from llmlaunch.report.text import one_line
from llmlaunch.rundir import file_names
from llmlaunch.rundir.attempt import Attempt
from llmlaunch.rundir.slow_devices import slow_devices
from llmlaunch.rundir.step_lines import LONGEST_LINE, Step
from llmlaunch.rundir.trainer_lines import RESULTS
from llmlaunch.rundir.values import to_type
from llmlaunch.units import duration
from llmlaunch.watch.gauges import MemoryReader
from llmlaunch.watch.loop import AskStates, StatePoller, View, watch
from llmlaunch.watch.model import Event, WatchedRun, step_lines, step_text
from llmlaunch.watch.run_reader import RunFacts, run_facts, typical_seconds
from llmlaunch.watch.screen import Screen

_LONGEST_EVENT = 160
_RESULTS = re.compile(RESULTS)
_PATIENCE_SECONDS = 5.0
_OVERDUE_SECONDS, _OVERDUE_STEPS = 60.0, 3.0
_STEPS_KEPT = 20
_LAST_LINES = 20
_SOCKETS_LINE = "NCCL INFO Using network Socket"  # NCCL 2.30, src/plugin/net.cc, with NCCL_DEBUG=INFO
SOCKETS = (
    "NCCL talks between nodes over sockets, although the cluster's profile has a fabric: steps will be slow. Look for "
    "the fabric's devices on the nodes (and in the container), NCCL_IB_DISABLE, NCCL_NET, and the NCCL plugin of the "
    "site"
)


class LogReader:
    """The lines of a run's logs as they are."""

    def __init__(self, submission: Submission, logs: JobLogs | None = None) -> None:
        self.submission = submission
        self._logs = logs or JobLogs(submission)
        self._name = run_name(submission.run_dir)
        self._shown = False

    @property
    def files(self) -> int:
        return len(self._logs.logs)

    def read(self, look: RunStatus) -> WatchedRun:
        events = tuple(Event(line) for line in self._logs.new_lines())
        self._shown = self._shown or bool(events)
        state = look.state
        return WatchedRun(self._name, self.submission.job_id, state.phase, state.reason, state.ended, events=events)

    def last_lines(self, look: RunStatus, width: int | None) -> Sequence[str]:
        return list(self._logs.to_end()) or ([] if self._shown else _scheduler_output(self.submission))


class EventReader:
    """What happens to a run and its steps, with what its monitors measure. Missing or torn files are no error."""

    def __init__(self, submission: Submission, tail: int | None = None) -> None:
        """`tail`: of logs that exist already, read so many last lines; None: read all."""
        self.submission = submission
        self._logs = JobLogs(submission, tail=tail)
        self._name = run_name(submission.run_dir)
        self._memory = MemoryReader()
        self._planned = run_facts(submission.run_dir, "")
        self._facts: dict[str, RunFacts] = {}
        self._first_read: dict[str, float] = {}
        self._reported: set[tuple[str, str]] = set()
        self._attempt = ""
        self._steps: deque[Step] = deque(maxlen=_STEPS_KEPT)
        self._loss_since: int | None = None
        self._step_read_at = 0.0
        self._slow_line = ""
        self._uses_sockets = False

    @property
    def readable(self) -> bool:
        """Whether the step lines of this run's trainer can be read."""
        return self._planned.readable

    @property
    def files(self) -> int:
        return len(self._logs.logs)

    def read(self, look: RunStatus) -> WatchedRun:
        events = tuple(self._events(look))
        return self._run(look, events)

    def last_lines(self, look: RunStatus, width: int | None) -> Sequence[str]:
        """Return what is left to show at the end; `width` is of the terminal on which steps were shown in place. The
        last step stays on the terminal; if there was none, the last lines of the logs show why."""
        if self._steps:
            return step_lines(step_text(self._run(look)), width) if width else []
        if look.state.phase == "succeeded":
            return []
        lines = list(JobLogs(self.submission, tail=_LAST_LINES).to_end()) or _scheduler_output(self.submission)
        return lines[-_LAST_LINES:]

    def _run(self, look: RunStatus, events: tuple[Event, ...] = ()) -> WatchedRun:
        facts = self._facts.get(self._attempt, self._planned)
        last = self._steps[-1] if self._steps else Step(None, None, None, None, None)
        return WatchedRun(
            name=self._name,
            job=self.submission.job_id,
            phase=look.state.phase,
            because=look.state.reason,
            step=last.step,
            steps=last.steps,
            loss=last.loss,
            loss_since=self._loss_since,
            step_seconds=last.seconds,
            typical_step_seconds=typical_seconds(self._steps),
            tokens_per_second=last.tokens_per_second,
            devices=facts.devices,
            overdue_seconds=self._overdue_seconds(),
            peak_kind=facts.peak_kind,
            gauges=self._memory.gauges() if self._steps else (),
            events=events,
        )

    def _overdue_seconds(self) -> float | None:
        waited = time.monotonic() - self._step_read_at
        usual = _OVERDUE_STEPS * (typical_seconds(self._steps) or 0.0)
        return waited if self._steps and waited > max(_OVERDUE_SECONDS, usual) else None

    def _events(self, look: RunStatus) -> Iterator[Event]:
        """Yield what happened since the last read, attempt by attempt: its beginning, lines of its logs, its end."""
        entries: dict[str, list[LogLine]] = {}
        for entry in self._logs.new_entries():
            entries.setdefault(entry.attempt, []).append(entry)
        names = attempt_names(self.submission)
        names += [name for name in entries if name not in names]
        for number, name in enumerate(names, start=1):
            if ("over", name) not in self._reported:
                yield from self._beginning(number, name, name == names[-1])
            for entry in entries.get(name, ()):
                yield from self._line_events(entry, look)
            if ("over", name) not in self._reported:
                yield from self._milestones(number, Attempt(self.submission.run_dir, name), name == names[-1])

    def _beginning(self, number: int, name: str, newest: bool) -> Iterator[Event]:
        if ("began", name) in self._reported:
            return
        files = Attempt(self.submission.run_dir, name)
        waited = time.monotonic() - self._first_read.setdefault(name, time.monotonic())
        if newest and not files.began and not files.status and waited < _PATIENCE_SECONDS:
            return  # the job is about to write down which layout it runs, and where
        self._reported.add(("began", name))
        self._facts[name] = run_facts(self.submission.run_dir, files.layout)
        if newest:
            self._memory.begin(files)
        from_step, note = files.began.get("from_step"), files.began.get("note")
        yield Event(attempt_began(number, name, files.nodes, files.layout, from_step, note))

    def _line_events(self, entry: LogLine, look: RunStatus) -> Iterator[Event]:
        facts = self._facts.get(entry.attempt, self._planned)
        step = facts.step_of(entry.text)
        if step is not None:
            last = self._steps[-1] if self._attempt == entry.attempt and self._steps else None
            if self._uses_sockets and facts.has_fabric and self._first("sockets", entry.attempt):
                yield Event(SOCKETS)
            if last is None or step.step is None or step.step != last.step:  # another rank may log the same step
                self._add(entry.attempt, step)
                yield Event(step_text(self._run(look)), transient=True, is_step=True)
        elif _SOCKETS_LINE in entry.text:
            self._uses_sockets = True
        elif facts.is_slow(entry.text) or _RESULTS.search(entry.text[:LONGEST_LINE]):
            text = one_line(entry.text).strip()[:_LONGEST_EVENT]
            if text != self._slow_line:  # every rank may log it
                self._slow_line = text
                yield Event(text)
        elif not self._steps and entry.node != JOB and entry.text.strip():
            yield Event(self._logs.text(entry), transient=facts.promised)

    def _add(self, attempt: str, step: Step) -> None:
        if attempt != self._attempt:
            self._steps.clear()
            self._loss_since = None
        if step.loss is not None:
            self._loss_since = None if math.isfinite(step.loss) else self._loss_since or step.step
        self._attempt, self._step_read_at = attempt, time.monotonic()
        self._steps.append(step)

    def _milestones(self, number: int, attempt: Attempt, newest: bool) -> Iterator[Event]:
        """Yield, each once, that an attempt got a stop signal, that it hangs, what became of its loss, that it ended
        and what comes next."""
        if attempt.stop_signal and not attempt.has_failed_node and self._first("told", attempt.name):
            yield Event(attempt_stopping(number, attempt.stop_signal))
        hung = attempt.progress.get("hung")
        if hung is not None and self._first("hung", attempt.name):
            yield Event(attempt_hangs(number, hung))
        loss = attempt_loss(number, attempt.progress)
        if loss and self._first(loss, attempt.name):
            yield Event(loss)
        for device in slow_devices(attempt.progress):
            if self._first(f"slow {device.name}", attempt.name):
                yield Event(f"Attempt {number}: {device.sentence()}")
        goes_on = (attempt.status.get("next") or {}).get("action", "end") != "end"
        if attempt.status and (goes_on or not newest) and self._first("over", attempt.name):
            yield Event(attempt_ended(number, attempt.status))
        elif not newest and self._first("over", attempt.name):
            yield Event(f"Attempt {number} left no status: its node was lost, or SLURM ended it at once")

    def _first(self, what: str, name: str) -> bool:
        fresh = (what, name) not in self._reported
        self._reported.add((what, name))
        return fresh


def _scheduler_output(submission: Submission) -> Sequence[str]:
    """Return the output of a job that died before it had a log of its own: where its launcher sent it."""
    run_dir = submission.run_dir
    for job_id in reversed(submission.jobs):
        for path in (run_dir / f"slurm-{job_id}.out", run_dir / file_names.LOGS / f"{job_id}.out"):
            if path.is_file():
                return read_log(path).splitlines()
    return []


_READ_SECONDS, _SEVERAL_READ_SECONDS = 0.5, 1.0
_LATE_READS = 2
_NEWS_OF_START = timedelta(minutes=15)
"""SLURM moves its expected start every half minute; a smaller change is not worth a line."""


def follow(
    submission: Submission,
    screen: Screen,
    raw: bool = False,
    logs: JobLogs | None = None,
    tail: int | None = None,
    ask: AskStates | None = None,
    poll_seconds: float | None = None,
    patience_seconds: float = 60.0,
) -> JobState:
    """Follow one run until it has ended and return its last state.

    On a terminal a step takes the place of the one before. The lines of the logs are shown instead if `raw` is set,
    if `logs` selects some, or if nobody knows this trainer's step lines. With `tail` only so many last lines are read
    of logs that exist already. The state is not an ended one after Ctrl-C, which stops following alone, or if no
    launcher knew the run for `patience_seconds`.
    """
    events = EventReader(submission, tail)
    as_lines = raw or logs is not None or not events.readable
    reader: LogReader | EventReader = (
        LogReader(submission, logs or JobLogs(submission, tail=tail)) if as_lines else events
    )
    poller = StatePoller([submission], screen.say, ask, poll_seconds)
    try:
        with screen.in_place():
            watch(
                poller,
                [reader],
                _OneRunView(screen, submission),
                _READ_SECONDS,
                patience_seconds=patience_seconds,
                late_reads=_LATE_READS,
            )
        for line in reader.last_lines(poller.looks[0], screen.width):
            screen.say(line)
    except KeyboardInterrupt:
        directory = submission.run_dir
        ours = can_be_cancelled(directory)
        screen.say(
            f"Stopped following; job {submission.job_id} continues. To look again: {to_type('status', directory)} or "
            f"{to_type('logs', directory)}" + (f"; to cancel it: {to_type('cancel', directory)}" if ours else "")
        )
    return poller.looks[0].state


def follow_several(
    submissions: Sequence[Submission],
    screen: Screen,
    ask: AskStates | None = None,
    poll_seconds: float | None = None,
    patience_seconds: float = 60.0,
) -> dict[str, JobState]:
    """Follow several runs until the last has ended, one line for each, and return the last states by job id.

    Without a terminal a line is written when the state of a run changes. Ctrl-C stops following alone.
    """
    poller = StatePoller(submissions, screen.say, ask, poll_seconds)
    readers = [EventReader(submission) for submission in submissions]
    try:
        with screen.in_place():
            watch(poller, readers, _SeveralRunsView(screen), _SEVERAL_READ_SECONDS, patience_seconds=patience_seconds)
    except KeyboardInterrupt:
        screen.say("Stopped following; the jobs continue. Look again: llmlaunch runs; cancel one: llmlaunch cancel DIR")
    return {look.submission.job_id: look.state for look in poller.looks}


class _OneRunView(View):
    """Writes each change of the state and each event; the latest step is shown in place."""

    def __init__(self, screen: Screen, submission: Submission) -> None:
        self._screen, self._submission = screen, submission
        self._state = JobState("unknown")
        self._shown = ""
        self._expected: datetime | None = None
        self._trouble = ""

    def show(self, looks: Sequence[RunStatus], runs: Sequence[WatchedRun], now: float, trouble: str) -> None:
        (look,), (run,) = looks, runs
        self._show_state(look.state)
        if trouble and trouble != self._trouble:
            self._screen.say(trouble)
        self._trouble = trouble
        for event in run.events:
            if not event.transient or (event.is_step and not self._screen.live):
                self._screen.say(event.text)
        transient = [event.text for event in run.events if event.transient]
        if transient or run.step is not None:
            self._screen.show(step_lines(_progress(run) or transient[-1], self._screen.width))

    def _show_state(self, state: JobState) -> None:
        """Write the state once; a running job speaks for itself."""
        reason = f": {state.reason}" if state.reason else ""
        text = f"{state.link} {state.phase}{reason}"
        if text != self._shown or self._moved(state.expected_start):
            self._expected = state.expected_start
            sentence = {
                "pending": waiting_text(state.reason, state.expected_start, datetime.now()),
                "running": "is running",
                "unknown": f"is not known{reason}",
            }.get(state.phase)
            if sentence:
                self._screen.say(f"Job {self._job(state)} {sentence}")
        self._shown = text

    def _job(self, state: JobState) -> str:
        jobs = self._submission.jobs
        return f"{jobs[state.link - 1]} ({state.link} of {len(jobs)})" if state.link else self._submission.job_id

    def _moved(self, expected: datetime | None) -> bool:
        if expected is None or self._expected is None:
            return expected is not None
        return abs(expected - self._expected) > _NEWS_OF_START


class _SeveralRunsView(View):
    """Writes each change of a state and each event after the run's name; the latest steps are shown in place."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._states: dict[str, tuple[str, str]] = {}

    def show(self, looks: Sequence[RunStatus], runs: Sequence[WatchedRun], now: float, trouble: str) -> None:
        for look, run in zip(looks, runs, strict=True):
            state = look.state.phase, look.state.reason
            if self._states.get(run.job) != state:
                self._screen.say(f"{run.title} {run.phase_text}")
            self._states[run.job] = state
            for event in run.events:
                if not event.transient:
                    self._screen.say(f"{run.title} {event.text}")
        lines = [f"{run.title} {(run.phase == 'running' and _progress(run)) or run.phase_text}" for run in runs]
        self._screen.show([*lines, trouble] if trouble else lines)


def _progress(run: WatchedRun) -> str:
    """Return the latest step and how long none was logged if that is unusual; empty before the first step."""
    overdue = "" if run.overdue_seconds is None else f" | no step for {duration(run.overdue_seconds)}"
    return "" if run.step is None and run.loss is None else step_text(run) + overdue
