"""The job's last act: the account of the attempt, so that whoever reads the store next need not open every node's file.

By then the verdict is written and said. What goes wrong here, or takes too long, changes nothing: `collect` makes the
same account from the same files.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from ..peaks.spool_place import is_private, spool_folder, spool_root
from ..peaks.summarize import SUMMARY, summarize
from .files import attempt_directory, replace_json, say

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE_SECONDS = 30.0  # the allocation is paid for, and a file system may hang


def write_summary(run_directory: Path, attempt: str, patience_seconds: float = PATIENCE_SECONDS) -> None:
    """Make `summary.json` of the attempt, or say in one line why there is none. The caller must leave by `os._exit`:
    what still hangs in the file system then is not waited for."""
    worker = threading.Thread(target=_write, args=(run_directory, attempt), daemon=True)
    worker.start()
    worker.join(patience_seconds)
    if worker.is_alive():
        say(f"{SUMMARY} was not ready in {patience_seconds:g} s; collect will read the nodes' own files")


def _write(run_directory: Path, attempt: str) -> None:
    try:
        summary = summarize(run_directory, attempt, _spools(run_directory))
        replace_json(attempt_directory(run_directory, attempt) / SUMMARY, summary.as_json())
    except Exception as error:
        say(f"{SUMMARY} not written: {type(error).__name__}: {error}; collect will read the nodes' own files")


def _spools(run_directory: Path) -> list[Path]:
    """What this node could not write to the run directory, and nobody has delivered so far."""
    root = spool_root(os.environ)
    folder = spool_folder(root, str(run_directory))
    return [folder] if is_private(root) and is_private(folder) else []
