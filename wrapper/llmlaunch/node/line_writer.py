"""The one thread that touches the run directory. Its file server may be gone, and then a call hangs: nobody waits."""

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
    from .files import Record
    from .local_spool import Spool
    from .peaks import PeaksFile

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
                say(f"monitor: {type(error).__name__}: {error}")
            self._since = None


class _Line:
    def __init__(self, content: bytes) -> None:
        self.content = content
        self.kept: bool | None = None  # in the spool; False: that could not take it; None: nobody asked it to


class Outbox:
    """Used by the main thread, which never waits: the disk thread writes, and hands back what it could not.

    A disk that takes `hang_seconds` over one thing waits for a server that is gone; what was kept is tried again every
    `retry_seconds`.
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
        self._on_the_way: deque[_Line] = deque()
        self._refused: deque[_Line] = deque()
        self._tried_at = time.monotonic()

    def put(self, record: Record, sync: bool = False) -> None:
        """A line cannot be lost from here on, but by SIGKILL or two full disks. `sync` asks for fsync now."""
        line = _Line(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        if self._hangs():
            self._keep_on_the_way()  # those before it
            self._keep(line)
        else:
            self._on_the_way.append(line)
            self._disk.give(lambda: self._write(line, sync))

    def settle(self) -> None:
        """Keep what was refused and what hangs; now and then, try to deliver what is kept."""
        self._keep_refused()
        if self._hangs():
            self._keep_on_the_way()
        elif time.monotonic() - self._tried_at >= self._retry_seconds:
            self.deliver()

    def deliver(self) -> None:
        self._tried_at = time.monotonic()
        self._disk.give(self._deliver)

    def finish(self, timeout_seconds: float) -> None:
        """The last: wait for the disk, and keep what it did not take."""
        if not self._hangs():
            self.deliver()
            self._disk.finish(timeout_seconds)
        self._keep_refused()
        self._keep_on_the_way()

    def _hangs(self) -> bool:
        return self._disk.waiting_seconds() >= self._hang_seconds

    def _keep_refused(self) -> None:
        while self._refused:
            self._keep(self._refused.popleft())

    def _keep_on_the_way(self) -> None:
        """They may still arrive, when the server comes back: whoever delivers leaves out what has."""
        for line in list(self._on_the_way):
            self._keep(line)

    def _keep(self, line: _Line) -> None:
        if line.kept is None:
            line.kept = True  # said first: from now on the disk thread leaves it to the spool
            if not self._spool.append(self._relative, line.content):
                line.kept = False
                self.dropped += 1

    # in the disk thread

    def _write(self, line: _Line, sync: bool) -> None:
        if not line.kept and not self._peaks.append(line.content, sync):
            self._refused.append(line)
        self._on_the_way.popleft()

    def _deliver(self) -> None:
        with contextlib.suppress(OSError):  # later
            self._spool.deliver()
