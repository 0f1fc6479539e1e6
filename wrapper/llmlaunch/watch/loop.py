"""The loop of `--follow` and `status --watch`: ask the launchers, read what is new in the files, hand it to a view."""

from __future__ import annotations

import functools
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from llmlaunch.errors import UserError
from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.launchers.run_files import latest_attempt, read_end
from llmlaunch.launchers.run_status import RunStatus, read_statuses
from llmlaunch.report.text import one_line
from llmlaunch.watch.model import WatchedRun, step_text

AskStates = Callable[[Sequence[Submission], Callable[[str], None]], list[RunStatus]]

_SLURM_SECONDS, _LOCAL_SECONDS = 5.0, 2.0
_SLOWER, _SLOWEST = 1.3, 6.0
"""While nothing changes SLURM is asked less and less often, down to a sixth of the first pace: everybody on the cluster
pays for a week of squeue calls. The files tell of a change sooner."""

_SECONDS_A_FILE = 0.01
"""Between two reads, for each file there may be to read: watching a thousand nodes must not keep a file server busy."""

_NAP_SECONDS = 0.25
_LATE_READ_SECONDS = 0.5


class StatePoller:
    """The states of runs, asked for in the background so that a slow scheduler does not hold up the view.

    `looks` holds the last answer, one look for each submission. The constructor waits briefly for the first one and
    raises what is wrong with it. What is wrong with a later one is `trouble`, and the last answer remains.
    """

    def __init__(
        self,
        submissions: Sequence[Submission],
        say: Callable[[str], None],
        ask: AskStates | None = None,
        poll_seconds: float | None = None,
    ) -> None:
        by_slurm = any(submission.launcher == "slurm" for submission in submissions)
        self._first_pause = poll_seconds or (_SLURM_SECONDS if by_slurm else _LOCAL_SECONDS)
        self._slowest = self._first_pause * (_SLOWEST if by_slurm else 1.0)
        self._pause = self._first_pause
        self._ask_states: AskStates = ask or read_statuses
        self.trouble = ""
        self.looks = (ask or functools.partial(read_statuses, briefly=True))(submissions, say)
        self._asked_at = time.monotonic()
        self._thread: threading.Thread | None = None

    def ask(self, shown: Sequence[RunStatus], at_once: bool = False) -> None:
        """Ask again if it is time and nobody is asking; only about runs that have not ended.

        `shown` are the looks the caller has shown: an answer that nobody has shown is not replaced by another.
        """
        due = at_once or time.monotonic() - self._asked_at >= self._pause
        waiting = [look.submission for look in self.looks if not look.state.ended]
        if shown is not self.looks or not due or not waiting or (self._thread is not None and self._thread.is_alive()):
            return
        if at_once:
            self._pause = self._first_pause
        self._asked_at = time.monotonic()
        self._thread = threading.Thread(target=self._ask, args=(waiting,), daemon=True)
        self._thread.start()

    def _ask(self, waiting: Sequence[Submission]) -> None:
        try:
            fresh = {id(look.submission): look for look in self._ask_states(waiting, self.note_trouble)}
        except (UserError, OSError) as error:
            self.trouble = str(error)
            return
        looks = [fresh.get(id(look.submission), look) for look in self.looks]
        changed = any(new.state != old.state for new, old in zip(looks, self.looks, strict=True))
        self._pause = self._first_pause if changed else min(self._pause * _SLOWER, self._slowest)
        self.looks = looks
        self.trouble = ""

    def note_trouble(self, line: str) -> None:
        """Show what a launcher waits for until it has answered."""
        self.trouble = line


class Reader(Protocol):
    """Reads the files of one run."""

    @property
    def files(self) -> int: ...

    def read(self, look: RunStatus) -> WatchedRun:
        """Return the run as it is now. `look` is the last answer of its launcher and may be some seconds old."""
        ...


class View(Protocol):
    """Draws runs, or writes what changed."""

    def show(self, looks: Sequence[RunStatus], runs: Sequence[WatchedRun], now: float, trouble: str) -> None:
        """Show the runs. `trouble` says what is wrong with the scheduler, if anything."""
        ...

    def idle(self) -> None:
        """Called a few times a second: a terminal may have another size now."""
        return


def watch(
    poller: StatePoller,
    readers: Sequence[Reader],
    view: View,
    interval_seconds: float,
    note_ends: Callable[[Iterable[tuple[Submission, JobState]]], None] = lambda ends: None,
    patience_seconds: float = 60.0,
    late_reads: int = 0,
) -> None:
    """Read and show the runs every `interval_seconds` until all have ended, and report each end to `note_ends`.

    A run that no launcher has known for `patience_seconds` is given up. After the last end the files are read until
    `late_reads` reads in a row show nothing new: NFS shows the last lines late. Raises KeyboardInterrupt on Ctrl-C.
    """
    _watch(poller, readers, view, interval_seconds, note_ends, patience_seconds)
    quiet = 0
    while quiet < late_reads:
        quiet = 0 if _show(poller.looks, readers, view, "") else quiet + 1
        time.sleep(_LATE_READ_SECONDS)


def _watch(
    poller: StatePoller,
    readers: Sequence[Reader],
    view: View,
    interval_seconds: float,
    note_ends: Callable[[Iterable[tuple[Submission, JobState]]], None],
    patience_seconds: float,
) -> None:
    """Read and show the runs until all have ended, or were given up."""
    known_at = [time.monotonic()] * len(readers)
    noted: set[int] = set()
    before: list[object] | None = None
    while True:
        looks = poller.looks
        news = _show(looks, readers, view, poller.trouble)
        ends = [n for n, look in enumerate(looks) if look.state.ended and n not in noted]
        if ends:
            noted.update(ends)
            note_ends((looks[n].submission, looks[n].state) for n in ends)
        for n, look in enumerate(looks):
            if look.state.phase != "unknown":
                known_at[n] = time.monotonic()
        oldest = time.monotonic() - patience_seconds
        if all(look.state.ended or at < oldest for look, at in zip(looks, known_at, strict=True)):
            break
        # They change when an attempt begins or has written its end: the launcher may know more then.
        going_on = [look.submission for look in looks if not look.state.ended]
        milestones: list[object] = [(latest_attempt(submission), read_end(submission)) for submission in going_on]
        poller.ask(looks, at_once=before is not None and milestones != before)
        before = milestones
        pause = 0.0 if news else max(interval_seconds, _SECONDS_A_FILE * sum(reader.files for reader in readers))
        _rest(pause, poller, view)


def _show(looks: Sequence[RunStatus], readers: Sequence[Reader], view: View, trouble: str) -> bool:
    """Read and show all runs once. Returns whether any logged something new."""
    runs = [reader.read(look) for reader, look in zip(readers, looks, strict=True)]
    view.show(looks, runs, time.time(), trouble)
    return any(run.events for run in runs)


def _rest(seconds: float, poller: StatePoller, view: View) -> None:
    """Sleep, but only until the state of a run has changed."""
    states = [look.state for look in poller.looks]
    until = time.monotonic() + seconds
    while time.monotonic() < until and [look.state for look in poller.looks] == states:
        time.sleep(min(_NAP_SECONDS, seconds))
        view.idle()


_NOTABLE_SHARE = 0.01


class LineView(View):
    """Writes a line for each change."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._before: dict[int, WatchedRun] = {}
        self._trouble = ""

    def show(self, looks: Sequence[RunStatus], runs: Sequence[WatchedRun], now: float, trouble: str) -> None:
        for n, run in enumerate(runs):
            for line in changes(self._before.get(n), run):
                self._write(line)
            self._before[n] = run
        if trouble and trouble != self._trouble:
            self._write(trouble)
        self._trouble = trouble


class JsonView(View):
    """Writes all runs as one JSON object a line when anything but the time has changed."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._before: list[dict[str, Any]] | None = None

    def show(self, looks: Sequence[RunStatus], runs: Sequence[WatchedRun], now: float, trouble: str) -> None:
        records = [_as_json(look, run) for look, run in zip(looks, runs, strict=True)]
        if records != self._before:
            self._write(json.dumps({"at": now, "runs": records}))
        self._before = records


def changes(before: WatchedRun | None, run: WatchedRun) -> list[str]:
    """Return the lines that say how `run` differs from `before`; None: nothing was written of it yet."""
    lines = []
    if before is None or (before.phase, before.because) != (run.phase, run.because):
        lines.append(f"{run.title} {run.phase_text}")
    moved = (
        before is None or before.step != run.step or abs(_peak(run) - _peak(before)) > _NOTABLE_SHARE * _peak(before)
    )
    if moved and (run.step is not None or run.fullest is not None):
        lines.append(f"{run.title} {step_text(run)}")
    earlier = before.remarks if before else ()
    return [*lines, *(f"{run.title} {one_line(remark)}" for remark in run.remarks if remark not in earlier)]


def _peak(run: WatchedRun) -> int:
    fullest = run.fullest
    return (fullest.peak_bytes or 0) if fullest else 0


def _as_json(look: RunStatus, run: WatchedRun) -> dict[str, Any]:
    """Return what `status --json` prints, with the newest step in `progress`, and `memory`."""
    progress: Mapping[str, Any] = look.as_json()["progress"] or {}
    newest = {
        "step": run.step,
        "steps": run.steps,
        "loss": run.loss if run.loss is not None and math.isfinite(run.loss) else None,  # JSON has no NaN
        "tokens_per_second": run.tokens_per_second,
        "step_seconds": run.step_seconds,
        "at": run.step_at,
    }
    has_progress = run.step is not None or run.loss is not None or bool(progress)
    return {
        **look.as_json(),
        "progress": {**progress, **newest} if has_progress else None,
        "peak_kind": run.peak_kind,
        "memory": [gauge.as_json() for gauge in run.gauges],
        "remarks": list(run.remarks),
    }
