"""Where a node keeps what it could not write to the run directory, until somebody can deliver it.

The monitor and the probes put it there and the monitor delivers it; `collect` on the same machine reads it, too. Below
the spool each run has a folder with a file `run`, the path of its run directory, and the same relative paths as there.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from .regular_files import read_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping


VARIABLE = "LLMLAUNCH_SPOOL"
RUN_FILE = "run"


def spool_root(environment: Mapping[str, str]) -> Path:
    """On the node's own disk, and kept over a reboot: /tmp often is neither."""
    named = environment.get(VARIABLE, "")
    return Path(named) if named else Path("/var/tmp") / f"llmlaunch-{os.getuid()}"


def spool_folder(root: Path, run_directory: str) -> Path:
    """The folder of one run, by the path as the job has it (LLMLAUNCH_RUN_DIR)."""
    return root / hashlib.sha256(os.fsencode(run_directory)).hexdigest()[:16]


def is_private(folder: Path) -> bool:
    """Whether it is a directory of ours that nobody else may write to: /var/tmp is everybody's, and a folder or link
    that another user put there first is not to be followed."""
    try:
        state = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o022


def spooled(root: Path) -> dict[Path, list[Path]]:
    """All folders with something in them, by the resolved run directory that each belongs to."""
    folders: dict[Path, list[Path]] = {}
    if not is_private(root):
        return folders
    for folder in sorted(root.iterdir()):
        try:
            run_directory = os.fsdecode(read_bytes(folder / RUN_FILE)).rstrip("\n")
        except OSError:
            continue
        if is_private(folder) and run_directory.startswith("/"):
            folders.setdefault(Path(os.path.realpath(run_directory)), []).append(folder)
    return folders
