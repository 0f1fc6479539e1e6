"""Where a trainer is: the hook that lets it write its stacks down, and the asking."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from .descent import listeners

STACKS_VARIABLE = "LLMLAUNCH_STACKS"
WRITES_STACKS = signal.SIGURG  # what the hook listens to; it ends nobody who does not
PIPE_VARIABLE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"  # of PyTorch: <this><rank>.pipe asks for the flight recorder


def prepare_stacks(attempt_directory: Path, rank: int) -> Path:
    """Set the variable that a trainer with the hook inherits; the file its stacks will be in."""
    path = attempt_directory / "stacks" / f"{rank}.txt"
    with contextlib.suppress(OSError):  # a full disk: the hook falls back on the log
        path.parent.mkdir(parents=True, exist_ok=True)
    os.environ[STACKS_VARIABLE] = str(path)
    return path


def ask_for_stacks(program: int, rank: int) -> None:
    """Of the program, or where it is a shell of those below it that have the hook. Raises nothing."""
    with contextlib.suppress(OSError):
        for pid in listeners(program, WRITES_STACKS):
            with contextlib.suppress(OSError):
                os.kill(pid, WRITES_STACKS)
    stem = os.environ.get(PIPE_VARIABLE)
    if stem:
        _poke(Path(f"{stem}{rank}.pipe"))


def remove_if_empty(path: Path | None) -> None:
    """The file of a trainer that was never asked, and the folder of the last of them."""
    with contextlib.suppress(OSError):
        if path is not None and path.stat().st_size == 0:
            path.unlink()
            path.parent.rmdir()


def _poke(pipe: Path) -> None:
    with contextlib.suppress(OSError):  # no such pipe, or nobody who reads it
        if pipe.is_fifo():
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(descriptor, b"1\n")
            finally:
                os.close(descriptor)
