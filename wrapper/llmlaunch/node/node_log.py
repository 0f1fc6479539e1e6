"""The one log of a node: what its ranks print, each line with its rank, and what this program says.

Ranks write into pipes, so that a full or hanging disk costs lines and never a trainer. One thread writes.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MOST_WAITING_BYTES = 2**23
STALLED_SECONDS = 2.0
LONGEST_LINE_BYTES = 2**16


class NodeLog:
    """Lines on their way to a descriptor. Before `start` they are written at once. Then `put` waits for a disk that is
    only slower than the ranks, as they would themselves; of one that has taken nothing for STALLED_SECONDS it drops
    what MOST_WAITING_BYTES do not hold."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._queue: deque[bytes | threading.Event] = deque()
        # Each number is written by one thread alone: `+=` is no single step.
        self._put_bytes = self._refused_bytes = 0  # by who puts
        self._taken_bytes = self._failed_bytes = 0  # by the thread that writes
        self._moved_at = time.monotonic()
        self._ready = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)

    def start(self) -> None:
        """Write in a thread from now on. Ranks may be forked meanwhile: it imports nothing, and a child needs none of
        its locks."""
        self._moved_at = time.monotonic()
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        return self._put_bytes - self._taken_bytes

    @property
    def dropped_bytes(self) -> int:
        return self._refused_bytes + self._failed_bytes

    def put(self, lines: bytes) -> None:
        if not self._thread.is_alive():
            self._write_all(lines)
            return
        while self._is_full(len(lines)) and time.monotonic() - self._moved_at < STALLED_SECONDS:
            time.sleep(0.005)
        if self._is_full(len(lines)):
            self._refused_bytes += len(lines)
            return
        self._put_bytes += len(lines)
        self._queue.append(lines)
        self._ready.release()

    def flush(self, seconds: float) -> bool:
        """Wait until all that was put is written or lost, so many seconds at most. Returns False for a disk that hangs,
        which is left behind."""
        if not self._thread.is_alive():
            return True
        done = threading.Event()
        self._queue.append(done)
        self._ready.release()
        return done.wait(seconds)

    def _is_full(self, more: int) -> bool:
        return self.waiting_bytes + more > MOST_WAITING_BYTES

    def _write(self) -> None:
        while True:
            self._ready.acquire()
            lines = self._queue.popleft()
            if isinstance(lines, threading.Event):
                lines.set()
                continue
            self._failed_bytes += len(lines) - self._write_all(lines)
            self._taken_bytes += len(lines)
            self._moved_at = time.monotonic()

    def _write_all(self, lines: bytes) -> int:
        """Return how much of it could be written."""
        written = 0
        try:
            while written < len(lines):
                try:
                    written += os.write(self._descriptor, lines[written:])
                except BlockingIOError:  # it shares its settings with a channel that never waits
                    select.select((), (self._descriptor,), ())
        except OSError:
            pass
        return written


class RankLines:
    """What one rank prints, as lines that begin with its number: `[rank3]: `, as torch itself names the rank of an
    exception. A line that names it already stays as it is. A carriage return ends a line, too."""

    def __init__(self, rank: int, log: NodeLog, hear: Callable[[Sequence[bytes]], None]) -> None:
        """`hear` takes the lines as they were printed."""
        self._name = b"[rank%d]:" % rank
        self._log, self._hear = log, hear
        self._rest = b""
        self._is_quiet = False

    def take(self, data: bytes) -> None:
        data = self._rest + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        lines, self._rest = data[:end], data[end:]
        self._is_quiet = False
        if lines:
            parts = lines.splitlines(keepends=True)
            self._log.put(b"".join(map(self._named, parts)))
            self._hear(parts)
        if len(self._rest) > LONGEST_LINE_BYTES:
            self.flush()

    def flush_if_quiet(self) -> None:
        """Write a line that has no end, where nothing came since the last call: a prompt, a bar that does not move."""
        if self._is_quiet:
            self.flush()
        self._is_quiet = True

    def flush(self) -> None:
        if self._rest:
            rest, self._rest = self._rest, b""
            self._log.put(self._named(rest) + b"\n")

    def _named(self, line: bytes) -> bytes:
        return line if line.startswith(self._name) or not line.strip() else self._name + b" " + line
