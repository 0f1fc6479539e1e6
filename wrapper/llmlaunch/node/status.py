"""How an attempt ended: `status.json`, the attempt's own and the run's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .files import attempt_directory, replace_json, say

if TYPE_CHECKING:
    from pathlib import Path

    from .files import Record

COMES_BACK_LATER = 75
"""Exit code of a job that saved and stopped before its last step (EX_TEMPFAIL of sysexits.h)."""


def write_status(run_directory: Path, status: Record) -> None:
    """Keep it with the attempt, then make it the run's. A disk that is full is said, and changes nothing else."""
    own = attempt_directory(run_directory, str(status["attempt"])) / "status.json"
    for path in (own, run_directory / "status.json"):
        try:
            replace_json(path, status)
        except OSError as error:
            say(f"{path} not written: {error.strerror}")
