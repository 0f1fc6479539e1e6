"""The stacks of the trainers: the file each writes them to, the request for them, and where the ranks of a training
that hangs stand by them (those few that stand elsewhere are why)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from ..rundir import file_names
from ..rundir.files import read_object, read_tail
from .process_tree import listeners

if TYPE_CHECKING:
    from collections.abc import Collection

STACKS_VARIABLE = "LLMLAUNCH_STACKS"
WRITES_STACKS = signal.SIGURG  # what the hook listens to; it ends nobody who does not
PIPE_VARIABLE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"  # of PyTorch: <this><rank>.pipe asks for the flight recorder
THREAD = re.compile(r"^(?:Current thread|Thread) .*\(most recent call first\):\n", re.MULTILINE)
FRAME = re.compile(r'  File "(?P<file>[^"\n]*)", line (?P<line>\d+) in (?P<function>.*)')
MOST_BYTES = 64 * 1024  # of one rank's file, from its end
MOST_PLACES = 3
MOST_NAMED = 4  # ranks


def prepare_stacks(attempt_directory: Path, rank: int) -> Path:
    """Set the variable that a trainer with the hook inherits; the file its stacks will be in."""
    path = attempt_directory / file_names.STACKS / f"{rank}.txt"
    with contextlib.suppress(OSError):  # a full disk: the hook falls back on the log
        path.parent.mkdir(parents=True, exist_ok=True)
    os.environ[STACKS_VARIABLE] = str(path)
    return path


def ask_for_stacks(program: int, rank: int) -> None:
    """Ask the program for its stacks, or where it is a shell those below it that have the hook. Raises nothing."""
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


def where_they_stand(attempt_directory: Path, ranks: int) -> str:
    """`no answer from rank 4 on node2, rank 1 on node1 in hangs_here (train.py line 19), 14 ranks in all_reduce (...)`:
    first those of all `ranks` that wrote nothing, stopped or stuck in the kernel, then the places where fewest stand.
    Empty where nobody wrote."""
    places: dict[str, list[int]] = {}
    for path in sorted((attempt_directory / file_names.STACKS).glob("*.txt")):
        place = _place(path) if path.stem.isdigit() else None
        if place is not None:
            places.setdefault(place, []).append(int(path.stem))
    fewest_first = sorted(places.items(), key=lambda item: (len(item[1]), min(item[1])))
    parts = [f"{_named(there, attempt_directory)} in {place}" for place, there in fewest_first[:MOST_PLACES]]
    if len(fewest_first) > MOST_PLACES:
        parts.append(f"others in {len(fewest_first) - MOST_PLACES} more places")
    silent = set(range(ranks)).difference(*places.values())
    if places and silent:
        parts.insert(0, f"no answer from {_named(silent, attempt_directory)}")
    return ", ".join(parts)


def _named(ranks: Collection[int], attempt_directory: Path) -> str:
    """Return `ranks 1 on node1, 2`: each with its node where that is known; of many only how many they are."""
    if len(ranks) > MOST_NAMED:
        return f"{len(ranks)} ranks"
    names = []
    for rank in sorted(ranks):
        record = read_object(attempt_directory / file_names.RANKS / f"{rank}.json")
        names.append(str(rank) if record is None else f"{rank} on {record.get('node')}")
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(names)


def _place(path: Path) -> str | None:
    """The innermost frame of the main thread, which the handler writes last."""
    try:
        text = read_tail(path, MOST_BYTES).decode(errors="replace")
    except OSError:
        return None
    threads = list(THREAD.finditer(text))
    frame = FRAME.match(text, threads[-1].end()) if threads else None
    if frame is None:
        return None
    return f"{frame['function']} ({Path(frame['file']).name} line {frame['line']})"
