"""What commands of the node side write for others: a line on stderr, and status.json."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from ..rundir import file_names
from ..rundir.atomic_files import replace_json

if TYPE_CHECKING:
    from pathlib import Path

    Record = dict[str, Any]

COMES_BACK_LATER = 75
"""Exit code of a job that saved and stopped before its last step (EX_TEMPFAIL of sysexits.h)."""


def say(message: str) -> None:
    """Write one line to stderr; where even that cannot be written, nothing."""
    with contextlib.suppress(OSError):
        os.write(2, f"llmlaunch: {message}\n".encode())


def write_status(run_directory: Path, status: Record) -> None:
    """Keep the verdict of an attempt with it, then make it the run's. A full disk is reported, and changes nothing
    else."""
    own = file_names.attempt_folder(run_directory, str(status["attempt"])) / file_names.STATUS
    for path in (own, run_directory / file_names.STATUS):
        try:
            replace_json(path, status)
        except OSError as error:
            say(f"{path} not written: {error.strerror}")
