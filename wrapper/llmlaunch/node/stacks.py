"""The stacks of the trainers: the file each writes them to, the request for them, and where the ranks of a training
that hangs stand by them (those few that stand elsewhere are why)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..rundir import file_names
from ..rundir.rank_records import rank_records
from ..rundir.regular_files import open_regular
from ..rundir.stack_files import HEADING, MOST_BYTES_OF_A_NODE, ranks_stacks
from .files import open_to_append, say
from .process_tree import listeners

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

STACKS_VARIABLE = "LLMLAUNCH_STACKS"
WRITES_STACKS = signal.SIGURG  # what the hook listens to; it ends nobody who does not
PIPE_VARIABLE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"  # of PyTorch: <this><rank>.pipe asks for the flight recorder
THREAD = re.compile(r"^(?:Current thread|Thread) .*\(most recent call first\):\n", re.MULTILINE)
FRAME = re.compile(r'  File "(?P<file>[^"\n]*)", line (?P<line>\d+) in (?P<function>.*)')
COLLECT_SECONDS, COLLECT_POLL_SECONDS = 60.0, 0.2  # a trainer that was stopped may answer late
MOST_PLACES = 3
MOST_NAMED = 4  # ranks


class RankStacks:
    """The stacks of one rank: its trainer writes them to a file on this node's own disk, from which they go to the
    node's file of the attempt, `stacks/<node>.txt`. A rank that is never asked leaves nothing on a shared file system.
    """

    def __init__(self, attempt_directory: Path, node: str, rank: int, folder: Path | None) -> None:
        """`folder` is one of this node's own; None makes the file in its folder for temporary files."""
        self._target = attempt_directory / file_names.STACKS / f"{node}.txt"
        self._rank = rank
        self._path: Path | None = None
        self._delivered = 0
        self._lock = threading.Lock()
        self.variable = ""  # of the trainer; where the file cannot be made, the hook falls back on the log
        with contextlib.suppress(OSError):
            descriptor, name = tempfile.mkstemp(f".{rank}.txt", "llmlaunch-stacks.", folder)
            os.close(descriptor)
            self._path = Path(name)
            self.variable = name

    def collect(self) -> None:
        """Deliver, from a thread of its own, what the trainer writes from now on."""
        threading.Thread(target=self._collect, name="stacks", daemon=True).start()

    def _collect(self) -> None:
        before = 0
        give_up_at = time.monotonic() + COLLECT_SECONDS
        while self._path is not None and time.monotonic() < give_up_at:
            time.sleep(COLLECT_POLL_SECONDS)
            with contextlib.suppress(OSError):
                size = self._path.stat().st_size
                if size == before:  # the handler has written all of it
                    self._deliver()
                before = size

    def close(self) -> None:
        """Deliver the rest, and remove this node's file. Called once the trainer has ended."""
        if self._path is not None:
            try:
                self._deliver()
            except OSError as error:
                say(f"{self._target} not written: {error.strerror}")
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _deliver(self) -> None:
        """Append what is new, in one write below a line that names the rank. Raises OSError."""
        with self._lock, open_regular(self._path) as file:  # type: ignore[arg-type]
            file.seek(self._delivered)
            text = file.read(MOST_BYTES_OF_A_NODE) or b""
            if not text:
                return
            descriptor = open_to_append(self._target)
            try:
                os.write(descriptor, b"\n%b\n%b" % (HEADING % self._rank, text))
            finally:
                os.close(descriptor)
            self._delivered += len(text)


def ask_for_stacks(program: int, rank: int, stacks: RankStacks | None, environment: Mapping[str, str]) -> None:
    """Ask the program for its stacks, or where it is a shell those below it that have the hook. Raises nothing."""
    with contextlib.suppress(OSError):
        for pid in listeners(program, WRITES_STACKS):
            with contextlib.suppress(OSError):
                os.kill(pid, WRITES_STACKS)
    if stacks is not None:
        stacks.collect()
    stem = environment.get(PIPE_VARIABLE)
    if stem:
        _poke(Path(f"{stem}{rank}.pipe"))


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
    for rank, text in sorted(ranks_stacks(attempt_directory).items()):
        place = _place(text)
        if place is not None:
            places.setdefault(place, []).append(rank)
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
    nodes = {record["rank"]: record.get("node") for record in rank_records(attempt_directory)}
    names = [f"{rank} on {nodes[rank]}" if rank in nodes else str(rank) for rank in sorted(ranks)]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(names)


def _place(text: str) -> str | None:
    """The innermost frame of the main thread, which the handler writes last."""
    threads = list(THREAD.finditer(text))
    frame = FRAME.match(text, threads[-1].end()) if threads else None
    if frame is None:
        return None
    return f"{frame['function']} ({Path(frame['file']).name} line {frame['line']})"
