"""`--follow`: why runs wait, what happens to them, and their steps or log lines, until they have ended."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.launchers.logs import JobLogs
from llmlaunch.launchers.run_files import can_be_cancelled
from llmlaunch.launchers.run_status import RunStatus
from llmlaunch.report.run_text import waiting_text
from llmlaunch.rundir.values import to_type
from llmlaunch.units import duration
from llmlaunch.watch.events import EventReader, FollowReader, LogReader
from llmlaunch.watch.loop import AskStates, StatePoller, View, watch
from llmlaunch.watch.model import WatchedRun, step_lines, step_text
from llmlaunch.watch.screen import Screen

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
    reader: FollowReader = LogReader(submission, logs or JobLogs(submission, tail=tail)) if as_lines else events
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
        """Return the job of a chain that the state belongs to."""
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
