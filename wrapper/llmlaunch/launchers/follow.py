"""Shows a job while it waits and runs, until it has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from llmlaunch.launchers.base import JobState, Launcher, Submission
from llmlaunch.launchers.logs import JobLogs
from llmlaunch.launchers.run_files import read_end

__all__ = ["follow"]

_READ_SECONDS = 0.5
_QUIET_READS = 2
"""So many reads without a new line after the job's end, and its logs are whole (NFS shows them late)."""


def follow(
    run_dir: Path,
    launcher: Launcher,
    submission: Submission,
    write: Callable[[str], None],
    poll_seconds: float = 5.0,
    patience_seconds: float = 60.0,
) -> JobState:
    """Write the queue's reason while the job waits, then its logs, line by line, until it has ended.

    Returns the last state. That is not an ended one after Ctrl-C, which only ends the looking, or where nobody has
    known the job for `patience_seconds`.
    """
    view = _View(submission, write, JobLogs(submission))
    state = JobState("unknown")
    try:
        while True:
            state = launcher.states([submission])[submission.job_id]
            view.tell(state)
            if state.ended or view.unknown_seconds > patience_seconds:
                break
            view.show_logs(poll_seconds)
        view.show_what_is_left()
    except KeyboardInterrupt:
        write(
            f"No longer following; job {submission.job_id} goes on. Look again: llmlaunch status {run_dir} or "
            f"llmlaunch logs {run_dir}; end it: llmlaunch cancel {run_dir}"
        )
    return state


@dataclass
class _View:
    submission: Submission
    write: Callable[[str], None]
    logs: JobLogs
    told: str = ""
    shown: bool = False
    unknown_since: float | None = field(default=None)

    @property
    def unknown_seconds(self) -> float:
        return 0.0 if self.unknown_since is None else time.monotonic() - self.unknown_since

    def tell(self, state: JobState) -> None:
        """Say what the launcher knows, each thing once; a running job speaks for itself."""
        if state.phase != "unknown":
            self.unknown_since = None
        elif self.unknown_since is None:
            self.unknown_since = time.monotonic()
        because = f": {state.reason}" if state.reason else ""
        words = {"pending": f"is waiting{because}", "running": "is running", "unknown": f"is not known{because}"}
        sentence = words.get(state.phase, "")
        if sentence and sentence != self.told:
            self.write(f"Job {self.submission.job_id} {sentence}")
        self.told = sentence

    def show_logs(self, seconds: float) -> None:
        """Copy new lines for so long, or until the job itself has written its end."""
        until = time.monotonic() + seconds
        ended = read_end(self.submission)
        while time.monotonic() < until:
            self._copy()
            time.sleep(min(_READ_SECONDS, seconds))
            if read_end(self.submission) != ended:
                return

    def show_what_is_left(self) -> None:
        quiet = 0
        while quiet < _QUIET_READS:
            quiet = 0 if self._copy() else quiet + 1
            time.sleep(_READ_SECONDS)
        for line in self.logs.to_end():
            self.write(line)
            self.shown = True
        if not self.shown:
            self._show_first_words()

    def _copy(self) -> bool:
        lines = self.logs.new_lines()
        for line in lines:
            self.write(line)
        self.shown = self.shown or bool(lines)
        return bool(lines)

    def _show_first_words(self) -> None:
        """A job that died before it had a log has only spoken to where its launcher sent its output."""
        job_id, run_dir = self.submission.job_id, self.submission.run_dir
        for path in (run_dir / f"slurm-{job_id}.out", run_dir / "logs" / f"{job_id}.out"):
            if path.is_file():
                for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                    self.write(line)
