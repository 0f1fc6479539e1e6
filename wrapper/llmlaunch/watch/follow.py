"""Shows jobs while they wait and run, until they have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol

from llmlaunch.causes.scan import read_log
from llmlaunch.launchers.base import JobState, Launcher, Submission
from llmlaunch.launchers.logs import JobLogs
from llmlaunch.launchers.run_files import read_end
from llmlaunch.report.run_text import waiting_words
from llmlaunch.rundir.messages import to_type
from llmlaunch.watch.events import RunWatch
from llmlaunch.watch.screen import Screen

__all__ = ["follow", "follow_steps"]

_READ_SECONDS = 0.5
_QUIET_READS = 2
"""So many reads without a new line after the job's end, and its logs are whole (NFS shows them late)."""

_SECONDS_A_FILE = 0.01
"""Between two looks for each log there is: who follows a job of a thousand nodes must not keep a file server busy."""

_SLOWER = 1.3
_SLOWEST = 6.0
"""While nothing changes the launcher is asked less and less often, down to a sixth of the first pace: a week of
squeue calls is paid by everybody on the cluster. The files tell sooner."""

_EXPECTED_MOVES = timedelta(minutes=15)
_LAST_WORDS = 20


def follow(
    run_dir: Path,
    launcher: Launcher,
    submission: Submission,
    write: Callable[[str], None],
    poll_seconds: float = 5.0,
    patience_seconds: float = 60.0,
    logs: JobLogs | None = None,
) -> JobState:
    """Write the queue's reason while the job waits, then its logs, line by line, until it has ended.

    Returns the last state. That is not an ended one after Ctrl-C, which only ends the looking, or where nobody has
    known the job for `patience_seconds`.
    """
    view = _RawView(_Teller(submission, write), logs or JobLogs(submission))
    return _follow(run_dir, launcher, submission, view, write, poll_seconds, patience_seconds)


def follow_steps(
    run_dir: Path,
    launcher: Launcher,
    submission: Submission,
    screen: Screen,
    poll_seconds: float = 5.0,
    patience_seconds: float = 60.0,
    tail: int | None = None,
) -> JobState:
    """As `follow`, but what happens to the run and its steps instead of its logs; on a terminal a step takes the
    place of the one before. Of a job whose trainer's lines nobody knows, the logs."""
    watch = RunWatch(submission, tail)
    view: _View
    if watch.readable:
        view = _StepsView(_Teller(submission, screen.say), watch, screen)
    else:
        view = _RawView(_Teller(submission, screen.say), JobLogs(submission, tail=tail))
    return _follow(run_dir, launcher, submission, view, screen.say, poll_seconds, patience_seconds)


class _View(Protocol):
    def tell(self, state: JobState) -> None:
        """Say what the launcher knows."""
        ...

    def copy(self) -> bool:
        """Show what the files say that is new; whether there was anything."""
        ...

    def close(self) -> None:
        """The last words."""
        ...

    @property
    def files(self) -> int:
        """How many logs are read at each look."""
        ...


def _follow(
    run_dir: Path,
    launcher: Launcher,
    submission: Submission,
    view: _View,
    say: Callable[[str], None],
    poll_seconds: float,
    patience_seconds: float,
) -> JobState:
    state, pause, unknown_since = JobState("unknown"), poll_seconds, time.monotonic()
    try:
        while True:
            before, state = state, launcher.states([submission])[submission.job_id]
            view.tell(state)
            if state.phase != "unknown":
                unknown_since = time.monotonic()
            if state.ended or time.monotonic() - unknown_since > patience_seconds:
                break
            pause = poll_seconds if state != before else min(pause * _SLOWER, poll_seconds * _SLOWEST)
            if _show_files(submission, view, pause):
                pause = poll_seconds
        quiet = 0
        while quiet < _QUIET_READS:
            quiet = 0 if view.copy() else quiet + 1
            time.sleep(_READ_SECONDS)
        view.close()
    except KeyboardInterrupt:
        say(
            f"No longer following; job {submission.job_id} goes on. Look again: {to_type('status', run_dir)} or "
            f"{to_type('logs', run_dir)}; end it: {to_type('cancel', run_dir)}"
        )
    return state


def _show_files(submission: Submission, view: _View, seconds: float) -> bool:
    """Copy what is new for so long, or until an attempt has begun or written its end: then True."""
    until = time.monotonic() + seconds
    before = _turning_point(submission)
    while time.monotonic() < until:
        if not view.copy():  # a long log is caught up with at once
            time.sleep(min(max(_READ_SECONDS, view.files * _SECONDS_A_FILE), seconds))
        if _turning_point(submission) != before:
            return True
    return False


def _turning_point(submission: Submission) -> object:
    return read_end(submission), len(list((submission.run_dir / "attempts").glob("*")))


@dataclass
class _Teller:
    """Says what the launcher knows, each thing once; a running job speaks for itself."""

    submission: Submission
    say: Callable[[str], None]
    told: str = ""
    expected: datetime | None = None

    def tell(self, state: JobState) -> None:
        because = f": {state.reason}" if state.reason else ""
        short = f"{state.link} {state.phase}{because}"
        if short != self.told or self._moved(state.expected_start):
            self.expected = state.expected_start
            words = {
                "pending": waiting_words(state.reason, state.expected_start, datetime.now()),
                "running": "is running",
                "unknown": f"is not known{because}",
            }
            sentence = words.get(state.phase, "")
            if sentence:
                self.say(f"Job {self._job(state)} {sentence}")
        self.told = short

    def _job(self, state: JobState) -> str:
        """Of a chain the job that the state is of."""
        jobs = self.submission.jobs
        return f"{jobs[state.link - 1]} ({state.link} of {len(jobs)})" if state.link else self.submission.job_id

    def _moved(self, expected: datetime | None) -> bool:
        """SLURM thinks again every half minute; only what matters to a person is news."""
        if expected is None or self.expected is None:
            return expected is not None
        return abs(expected - self.expected) > _EXPECTED_MOVES


@dataclass
class _RawView:
    """The lines of the logs as they are."""

    teller: _Teller
    logs: JobLogs
    shown: bool = False

    def tell(self, state: JobState) -> None:
        self.teller.tell(state)

    @property
    def files(self) -> int:
        return len(self.logs.logs)

    def copy(self) -> bool:
        lines = self.logs.new_lines()
        for line in lines:
            self.teller.say(line)
        self.shown = self.shown or bool(lines)
        return bool(lines)

    def close(self) -> None:
        for line in self.logs.to_end():
            self.teller.say(line)
            self.shown = True
        if not self.shown:
            for line in _first_words(self.teller.submission):
                self.teller.say(line)


@dataclass
class _StepsView:
    """Events, and one line for each step."""

    teller: _Teller
    watch: RunWatch
    screen: Screen
    ended: JobState = field(default=JobState("unknown"))

    def tell(self, state: JobState) -> None:
        self.ended = state
        self.teller.tell(state)

    @property
    def files(self) -> int:
        return self.watch.files

    def copy(self) -> bool:
        found = list(self.watch.news())
        for news in found:
            if not news.passing or (news.is_step and not self.screen.live):
                self.screen.say(news.text)
        passing = [news.text for news in found if news.passing]
        if passing or self.watch.line:
            self.screen.show([self.watch.line + self.watch.silence if self.watch.line else passing[-1]])
        return bool(found)

    def close(self) -> None:
        """The last step stays; where there was none, the last lines of the logs say why."""
        self.screen.clear()
        if self.watch.line and self.screen.live:
            self.screen.say(self.watch.line)
        if self.watch.step is None and self.ended.phase != "succeeded":
            submission = self.teller.submission
            lines = list(JobLogs(submission, tail=_LAST_WORDS).to_end()) or _first_words(submission)
            for line in lines[-_LAST_WORDS:]:
                self.screen.say(line)


def _first_words(submission: Submission) -> Sequence[str]:
    """A job that died before it had a log has only spoken to where its launcher sent its output."""
    run_dir = submission.run_dir
    for job_id in reversed(submission.jobs):
        for path in (run_dir / f"slurm-{job_id}.out", run_dir / "logs" / f"{job_id}.out"):
            if path.is_file():
                return read_log(path).splitlines()
    return []
