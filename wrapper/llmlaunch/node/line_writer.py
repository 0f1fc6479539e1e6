"""A monitor's lines on their way to `peaks/<node>.jsonl`, or, where that cannot be written, to the node's own disk.

One thread alone touches the run directory. Its file server may be gone, and then a call hangs: nobody waits for it.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING

from .files import say

if TYPE_CHECKING:
    from .files import PeaksFile, Record
    from .local_spool import Spool

    Task = Callable[[], None]


class DiskThread:
    """Does what it is given, one after the other."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task] = SimpleQueue()
        self._since: float | None = None
        self._thread = threading.Thread(target=self._run, name="disk", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def give(self, task: Task) -> None:
        self._tasks.put(task)

    def waiting_seconds(self) -> float:
        """How long the present task has taken; 0 between tasks."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def idle(self) -> bool:
        return self._since is None and self._tasks.empty()

    def finish(self, timeout_seconds: float) -> bool:
        """Wait until all that was given is done; False where it is not in time."""
        done = threading.Event()
        self.give(done.set)
        return done.wait(timeout_seconds)

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            self._since = time.monotonic()
            try:
                task()
            except Exception as error:  # of this task; the next one may do
                say(f"disk: {type(error).__name__}: {error}")
            self._since = None


class _Line:
    def __init__(self, content: bytes) -> None:
        self.content = content
        self.spooled: bool | None = None  # False: the spool could not take it; None: it was not asked to


class LineWriter:
    """Used by the main thread, which never waits: the disk thread writes, and hands back what it could not.

    A disk that takes `hang_seconds` over one thing waits for a server that is gone; what is spooled is tried again
    every `retry_seconds`.
    """

    def __init__(
        self, disk: DiskThread, peaks: PeaksFile, spool: Spool, relative: str, hang_seconds: float, retry_seconds: float
    ) -> None:
        self.dropped = 0  # lines that neither disk could take
        self._disk = disk
        self._peaks = peaks
        self._spool = spool
        self._relative = relative
        self._hang_seconds = hang_seconds
        self._retry_seconds = retry_seconds
        self._pending: deque[_Line] = deque()
        self._refused: deque[_Line] = deque()
        self._delivery_tried_at = time.monotonic()

    def put(self, record: Record, sync: bool = False) -> None:
        """A line cannot be lost from here on, but by SIGKILL or two full disks. `sync` asks for fsync now."""
        line = _Line(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        if self._hangs():
            self._spool_pending()  # those before it
            self._put_in_spool(line)
        else:
            self._pending.append(line)
            self._disk.give(lambda: self._write(line, sync))

    def settle(self) -> None:
        """Spool what was refused and what hangs; now and then, try to deliver what is spooled."""
        self._spool_refused()
        if self._hangs():
            self._spool_pending()
        elif time.monotonic() - self._delivery_tried_at >= self._retry_seconds:
            self.deliver()

    def deliver(self) -> None:
        self._delivery_tried_at = time.monotonic()
        self._disk.give(self._deliver)

    def finish(self, timeout_seconds: float) -> None:
        """End: wait for the disk, and spool what it did not take."""
        if not self._hangs():
            self.deliver()
            self._disk.finish(timeout_seconds)
        self._spool_refused()
        self._spool_pending()

    def _hangs(self) -> bool:
        return self._disk.waiting_seconds() >= self._hang_seconds

    def _spool_refused(self) -> None:
        while self._refused:
            self._put_in_spool(self._refused.popleft())

    def _spool_pending(self) -> None:
        """They may still arrive, when the server comes back: whoever delivers leaves out what has."""
        for line in list(self._pending):
            self._put_in_spool(line)

    def _put_in_spool(self, line: _Line) -> None:
        if line.spooled is None:
            line.spooled = True  # set first: from now on the disk thread leaves it to the spool
            if not self._spool.append(self._relative, line.content):
                line.spooled = False
                self.dropped += 1

    # in the disk thread

    def _write(self, line: _Line, sync: bool) -> None:
        if not line.spooled and not self._peaks.append(line.content, sync):
            self._refused.append(line)
        self._pending.popleft()

    def _deliver(self) -> None:
        with contextlib.suppress(OSError):  # later
            self._spool.deliver()
