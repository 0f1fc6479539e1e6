"""The watchdog of an attempt, in the job's program: it notes the progress, judges the loss, names slow devices, has the
step ended when it hangs, and looks for the stop file.

What touches the run directory is done by the thread for it: a file server that is gone must not keep a job from being
ended. Whatever goes wrong in here costs the watching alone.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Protocol

from ..rundir import file_names
from ..rundir.attempt import Attempt
from ..rundir.file_names import attempt_folder
from ..rundir.files import replace_json
from ..rundir.run_file import ProgressRules, read_run_file
from ..rundir.stack_files import ranks_stacks
from ..rundir.step_lines import StepNews
from .allocation import replaceable_nodes
from .checkpoint import durable_step, read_tracker
from .files import say
from .notices import first_step_text, notify, stall_text
from .pace import PaceWatch
from .progress import StepTracker
from .prune import Pruner, kept_count
from .stacks import where_they_stand
from .window_clock import WINDOW_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

    from ..rundir.attempt_files import BadLossRecord, Hang, Progress, StepsBehind
    from ..rundir.step_lines import Step
    from .event_loop import EventLoop
    from .line_writer import DiskThread


LOOK_SECONDS = 2.0
WRITE_SECONDS = 5.0  # between two progress.json
DUMP_SECONDS = 20.0  # for stacks and flight recorder
TERM_SECONDS = 60.0  # from TERM to KILL of a step that hangs
STOOD_STILL_SECONDS = 10.0
FILES_SECONDS = 10.0  # that a look at files may take, before what it would say is not waited for


class StepControl(Protocol):
    """The training step, as its watchdog acts on it."""

    def stop(self) -> None:
        """Have the trainers save and end, as when the job is told to."""

    def save(self) -> None:
        """The same for the trainers alone: the job may go on."""

    def ask_for_stacks(self) -> None: ...

    def end(self, term_seconds: float) -> None:
        """End the trainers: TERM, and KILL after so many seconds."""

    @property
    def is_stopping(self) -> bool:
        """Whether its trainers were asked to save."""


class AttemptWatchdog:
    """The watchdog of one attempt. Raises OSError or ValueError where its run.json cannot be used."""

    def __init__(
        self,
        run_directory: Path,
        attempt: str,
        layout: str,
        step: StepControl,
        loop: EventLoop,
        disk: DiskThread,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        run = read_run_file(run_directory, layout)
        progress = run.get("progress") or ProgressRules()
        self._run_directory, self._attempt = run_directory, attempt
        self._step, self._loop, self._disk = step, loop, disk
        self._directory = attempt_folder(run_directory, attempt)
        self._checkpoint = run.get("checkpoint")
        self._saved_step: int | None = None
        prunes = kept_count(self._checkpoint) > 0
        self._pruner = Pruner(run_directory, attempt, layout) if prunes else None
        self._behind: StepsBehind | None = None
        begun = Attempt(run_directory, attempt).began
        # a script of the person's own may count its steps anew
        self._from_step = (begun.get("tracker_step") or 0) if progress.get("promised") else 0
        self._nodes = run.get("nodes") or 1
        self._ranks = self._nodes * (run.get("devices_per_node") or 1)
        seconds = _look_seconds(look_seconds, progress.get("floor_seconds"))
        self._clock = Clock(seconds + STOOD_STILL_SECONDS)
        self._tracker = StepTracker(progress, self._clock.now())
        self._loss_judge: LossJudge | None = LossJudge(begun.get("loss_limit"))
        self._on_bad_loss = run.get("on_bad_loss") or {}
        self._pace = PaceWatch(run_directory, attempt, begun.get("nodes"), WINDOW_SECONDS)
        self._replaced: list[str] = []  # slow nodes for which the trainers were asked to end
        self._silent_until = None if progress.get("promised") else progress.get("first_step_seconds")
        self._stop_requested = self._unwritten = self._looks_at_files = self._is_over = False
        self._hung: Hang | None = None
        self._written_at = -WRITE_SECONDS
        self._first_step_at: float | None = None  # unix seconds
        self._at: float | None = None  # unix seconds of the last step
        loop.every(seconds, self._look)

    def hear(self, news: StepNews) -> None:
        """Take what the trainers report of their steps; once they are ended, no more."""
        if self._is_over:
            return
        is_first = not self._tracker.any_step
        fresh = self._tracker.update(news, self._clock.now())
        self._judge_loss(news.steps)
        if not fresh:
            return
        self._at, self._unwritten = time.time(), True
        if self._hung is not None:
            self._hung = None
            say("watchdog: a step completed after all; the training continues")
            self._write()
        if is_first:
            self._first_step_at = time.time()
            notify(self._run_directory, self._attempt, "first_step", first_step_text(self._tracker.record()))
        if self._began_behind():
            self._give_up(TERM_SECONDS)
        elif self._ends_for_loss():
            self._give_up(0.0)  # each would save a bad model over good checkpoints at a TERM

    def close(self) -> None:
        """Write the last of the progress; the step has ended."""
        self._is_over = True
        self._write()

    def _look(self) -> None:
        now = self._clock.now()
        if self._is_over:
            return
        self._warn_if_no_step()
        if self._unwritten and now - self._written_at >= WRITE_SECONDS:
            self._write()
        if not self._looks_at_files:
            self._looks_at_files = True
            self._disk.give(self._look_at_files)
        if self._hung is None:
            self._notice_hang()

    def _look_at_files(self) -> None:
        """By the thread for files: what is new of the pace, and whether the stop file is there."""
        try:
            is_told = is_there(self._run_directory / file_names.STOP)
            is_changed = self._pace.look()
            slow_nodes: list[str] = []
            if is_changed and not self._replaced and not self._stop_requested and self._tracker.any_step:
                slow_nodes = replaceable_nodes(Attempt(self._run_directory, self._attempt), self._pace.slow)
            self._loop.post(lambda: self._take_files(is_told, is_changed, slow_nodes))
        finally:
            self._looks_at_files = False

    def _take_files(self, is_told: bool, is_changed: bool, slow_nodes: list[str]) -> None:
        self._unwritten = self._unwritten or is_changed
        if self._is_over:
            return
        if is_told and not self._stop_requested:
            self._stop_requested = True
            say(f"watchdog: {self._run_directory / file_names.STOP} is there: asking the trainers to save and stop")
            self._step.stop()
        elif slow_nodes and not self._replaced:
            # The job is not told, since it would not start again in its allocation.
            self._replaced = slow_nodes
            self._write()
            names = ", ".join(slow_nodes)
            say(f"watchdog: asking the trainers to save and end: spare nodes take the place of {names}")
            self._step.save()

    def _judge_loss(self, steps: list[Step]) -> None:
        """Say what is bad about the loss, once. A mistake in here costs this judgement alone."""
        if self._loss_judge is None:
            return
        try:
            sentences = [self._loss_judge.judge(step) for step in steps]
        except Exception as error:
            say(f"watchdog: the loss is judged no more: {type(error).__name__}: {error}")
            self._loss_judge = None
            return
        for sentence in filter(None, sentences):
            say(f"watchdog: {sentence}")
            notify(self._run_directory, self._attempt, "bad_loss", sentence)
            self._unwritten = True

    def _notice_hang(self) -> None:
        """Ask for stacks where the next step is overdue; the step is ended when they are there, or nothing came."""
        hung = self._tracker.overdue(self._clock.now(), saving=self._step.is_stopping)
        if hung is None:
            return
        self._hung = hung
        self._write()
        say(
            f"watchdog: hung: no sign of {hung['what']} for {hung['since_seconds']:.0f} s "
            f"(limit {hung['allowed_seconds']:.0f} s); requesting the stacks of all ranks"
        )
        self._step.ask_for_stacks()
        self._disk.give(lambda: self._wait_for_dumps(hung))
        self._loop.after(DUMP_SECONDS + FILES_SECONDS, lambda: self._end_hung(hung, ""))

    def _wait_for_dumps(self, hung: Hang) -> None:
        """By the thread for files: wait until every rank's stacks are there and grow no more, DUMP_SECONDS at most."""
        give_up_at = time.monotonic() + DUMP_SECONDS
        before = None
        while time.monotonic() < give_up_at and self._hung is hung and not self._is_over:
            now = [_file_sizes(self._directory / folder) for folder in (file_names.STACKS, file_names.FLIGHT)]
            if now == before and self._all_wrote(*now):
                break
            before = now
            time.sleep(max(0.5, self._ranks / 1000.0))  # each look asks the file system for every node's files
        where = where_they_stand(self._directory, self._ranks)
        self._loop.post(lambda: self._end_hung(hung, where))

    def _all_wrote(self, stacks: dict[str, int] | None, flight: dict[str, int] | None) -> bool:
        """Whether every rank wrote its stacks and, where there is a flight recorder, its last collectives."""
        if stacks is None or len(stacks) < self._nodes or (flight is not None and len(flight) < self._ranks):
            return False
        return len(ranks_stacks(self._directory)) >= self._ranks

    def _end_hung(self, hung: Hang, where: str) -> None:
        """End the step, unless a step completed after all, or that was done already."""
        if self._hung is not hung or self._is_over or "where" in hung:
            return
        hung["where"] = where
        self._write()
        say(f"watchdog: ending the training step; {where or 'no rank wrote its stacks'}")
        notify(self._run_directory, self._attempt, "stall", stall_text(hung, self._tracker.record()))
        self._give_up(TERM_SECONDS)

    def _give_up(self, term_seconds: float) -> None:
        self._is_over = True
        self._step.end(term_seconds)

    def _began_behind(self) -> bool:
        """Whether the trainers did not load the checkpoint: their first step is one that the checkpoint contains.
        Without this they would train again, and save over it."""
        first = self._tracker.first_step
        if first is None or first > self._from_step or self._behind is not None:
            return False
        self._behind = {"first_step": first, "checkpoint_step": self._from_step}
        self._write()
        say(f"watchdog: the trainers began at step {first}, not after the checkpoint of step {self._from_step}; ending")
        return True

    def _ends_for_loss(self) -> bool:
        """Whether the loss is bad and stays so, and the recipe has the training ended for it."""
        bad = self._loss_judge.lasting if self._loss_judge else None
        if bad is None or self._on_bad_loss.get("action") not in ("stop", "rollback"):
            return False
        if bad["kind"] == "spike" and not self._on_bad_loss.get("spike"):
            return False
        bad["ended"] = True
        self._write()
        say("watchdog: ending the training step for its loss, without a save")
        return True

    def _warn_if_no_step(self) -> None:
        if self._silent_until is None or self._clock.now() < self._silent_until:
            return
        self._silent_until = None
        if not self._tracker.any_step:
            say("watchdog: no log line reports a step, so a hang cannot be detected; only the stop file is watched")

    def _write(self) -> None:
        nothing_to_say = self._hung is None and not self._tracker.any_step and not self._pace.slow
        if nothing_to_say and self._written_at < 0.0:
            return
        record: Progress = {
            "schema": 1,
            **self._tracker.record(),
            "tracker_step": None,  # as the thread for files finds it
            "first_step": self._tracker.first_step,
            "first_step_at": self._first_step_at,
            "at": self._at,
            "hung": None if self._hung is None else self._hung.copy(),
            "behind": self._behind,
            "good_step": self._loss_judge.good_step if self._loss_judge else None,
            "bad_loss": self._loss_judge.bad if self._loss_judge else None,
            "slow": [device.as_json() for device in self._pace.slow],
        }
        if self._replaced:
            record["replaced"] = self._replaced
        is_trusted = self._loss_judge is None or not self._loss_judge.in_doubt
        self._disk.give(lambda: self._write_file(record, is_trusted))
        self._unwritten, self._written_at = False, self._clock.now()

    def _write_file(self, record: Progress, is_trusted: bool) -> None:
        """By the thread for files. A full or read-only disk keeps it from being written; the next one may be."""
        named = read_tracker(self._checkpoint)
        if named is not None:  # a tracker that vanishes later does not unsay it
            self._saved_step = max(named, self._saved_step or 0)
            if self._pruner is not None and is_trusted and not self._is_over:
                self._pruner.start(durable_step(self._checkpoint) or 0)
        record["tracker_step"] = self._saved_step
        replace_json(self._directory / file_names.PROGRESS, record)


class Clock:
    """Seconds since the start, without those in which this process stood still itself (suspended by SLURM, stuck in
    a file system): the training may have stood still with it."""

    def __init__(self, longest_tick: float) -> None:
        self._longest_tick = longest_tick
        self._read_at = time.monotonic()
        self._seconds = 0.0

    def now(self) -> float:
        read_at = time.monotonic()
        self._seconds += min(read_at - self._read_at, self._longest_tick)
        self._read_at = read_at
        return self._seconds


def _look_seconds(requested: float, floor: object) -> float:
    """A small floor needs quick looks."""
    return min(requested, max(0.1, floor / 10.0)) if isinstance(floor, (int, float)) else requested


def is_there(path: Path) -> bool:
    """False also where the file system does not say (a stale handle, no permission)."""
    try:
        path.stat()
    except OSError:
        return False
    return True


def _file_sizes(directory: Path) -> dict[str, int] | None:
    """Map the names of the non-empty files in `directory` to their bytes; None where there is no such folder."""
    try:
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(directory) if entry.is_file()}
    except OSError:
        return None
    return {name: size for name, size in sizes.items() if size}


WINDOW = 100  # losses that are compared with
FEWEST = 20  # before so many nothing is called a spike: the first steps of a warm-up
DEVIATIONS = 7.0
STANDARD = 1.4826  # standard deviations of a normal distribution in one median absolute deviation
LEAST_RISE = 0.1  # of the median, for a loss that hardly varies
SPIKE_LINES = 5  # in a row, until a loss far above the others is a spike; and as many good ones until it is over
NOT_FINITE_LINES = 2  # in a row, until NaN lasts: a step that overflowed may have been skipped (fp16's loss scale)


class LossJudge:
    """The judge of one attempt's losses, as its log shows them. `limit` is the highest loss that counts as usual before
    enough were seen; None where nothing is known of an earlier attempt."""

    def __init__(self, limit: float | None = None) -> None:
        self._first_limit = limit
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._last_step: int | None = None
        self._suspect: BadLossRecord | None = None  # what a row of bad lines may become
        self._bad_lines = self._good_lines = 0
        self._healed_at: int | None = None  # the first good step after bad ones
        self.good_step: int | None = None  # the last one whose loss was good
        self.bad: BadLossRecord | None = None  # the "bad_loss" of progress.json

    def judge(self, step: Step) -> str:
        """Take in one step line. Returns the sentence to say about it: that the loss became bad, or usual again;
        nearly always empty."""
        if step.loss is None or (step.step is not None and step.step == self._last_step):
            return ""  # several ranks may log the same step
        self._last_step = step.step
        limit = self.limit
        if math.isfinite(step.loss) and (limit is None or step.loss <= limit):
            return self._take_good(step, step.loss)
        return self._take_bad(step, step.loss)

    @property
    def limit(self) -> float | None:
        """The highest loss that counts as usual; None where too few are known."""
        if len(self._losses) < FEWEST:
            return self._first_limit
        middle = median(self._losses)
        deviation = median(abs(loss - middle) for loss in self._losses)
        return middle + max(DEVIATIONS * STANDARD * deviation, LEAST_RISE * abs(middle))

    @property
    def in_doubt(self) -> bool:
        """Whether the last loss was bad, or too few good ones came since: older checkpoints may be needed."""
        return self._bad_lines > 0 or (self.bad is not None and self.bad["recovered_step"] is None)

    @property
    def lasting(self) -> BadLossRecord | None:
        """What is bad about the loss, where it shows no sign of recovering; else None."""
        lasts = self._suspect is not None and self._bad_lines >= _lines(self._suspect["kind"], NOT_FINITE_LINES)
        return self.bad if lasts else None

    def _take_good(self, step: Step, loss: float) -> str:
        if not self._good_lines:
            self._healed_at = step.step
        self._suspect, self._bad_lines, self._good_lines = None, 0, self._good_lines + 1
        self.good_step = step.step
        self._losses.append(loss)
        if self.bad is None or self.bad["recovered_step"] is not None or self._good_lines < SPIKE_LINES:
            return ""
        self.bad["recovered_step"] = self._healed_at
        return f"the loss is as usual again{_since(self._healed_at)}: {loss:.4g}"

    def _take_bad(self, step: Step, loss: float) -> str:
        kind = "spike" if math.isfinite(loss) else "not_finite"
        if self._suspect is None or self._suspect["kind"] != kind:
            usual = round(median(self._losses), 6) if self._losses else None
            self._suspect = {"kind": kind, "since_step": step.step, "good_step": self.good_step, "usual": usual}
            self._bad_lines = 0
        self._bad_lines, self._good_lines = self._bad_lines + 1, 0
        known = self.bad is not None and self.bad["recovered_step"] is None and self.bad["kind"] in (kind, "not_finite")
        if known or self._bad_lines < _lines(kind, 1):
            return ""
        self.bad = {
            **self._suspect,
            "loss": loss if kind == "spike" else str(loss),
            "limit": _rounded(self.limit),
            "recovered_step": None,
            "ended": False,
        }
        return _sentence(self.bad)


def _lines(kind: str, not_finite: int) -> int:
    return SPIKE_LINES if kind == "spike" else not_finite


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _since(step: int | None) -> str:
    return "" if step is None else f" since step {step}"


def _sentence(bad: BadLossRecord) -> str:
    since = _since(bad["since_step"])
    if bad["kind"] == "not_finite":
        return f"the loss is {'NaN' if bad['loss'] == 'nan' else 'infinite'}{since}"
    before = "" if bad["usual"] is None else f"; it was {bad['usual']:.4g}"
    return f"the loss has spiked{since}, now {bad['loss']:.4g}{before}"
