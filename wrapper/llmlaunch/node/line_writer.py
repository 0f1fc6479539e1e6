"""A monitor's lines on their way to `peaks/<node>.jsonl`. Lines wait in memory while the run directory cannot be
written, and are written in their order once it can.

One thread alone touches the run directory. Its file server may be gone, and then a call hangs: nobody waits for it.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from .files import say

if TYPE_CHECKING:
    from .files import PeaksFile, Record

    Task = Callable[[], None]

MOST_WAITING = 256  # lines, each of some KB; without pace lines that is hours of a driver that hangs and comes back
LAST_TRY_SECONDS = 0.1  # between two tries of the end


class DiskThread:
    """Does what it is given, one after the other."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task] = SimpleQueue()
        self._busy = False
        self._thread = threading.Thread(target=self._run, name="disk", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def give(self, task: Task) -> None:
        self._tasks.put(task)

    @property
    def idle(self) -> bool:
        return not self._busy and self._tasks.empty()

    def finish(self, timeout_seconds: float) -> bool:
        """Wait until all that was given is done; False where it is not in time."""
        done = threading.Event()
        self.give(done.set)
        return done.wait(timeout_seconds)

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            self._busy = True
            try:
                task()
            except Exception as error:  # of this task; the next one may do
                say(f"disk: {type(error).__name__}: {error}")
            self._busy = False


class _Line(NamedTuple):
    event: str
    content: bytes
    sync: bool


class LineWriter:
    """Used by the main thread, which never waits before its end: the disk thread writes.

    Peaks are cumulative, so a new line with peaks replaces a beat that still waits. If too many other lines wait, the
    oldest pace is given up first, since a pace that comes late is of no use. Refused lines are tried again every
    `retry_seconds`, and with each new line.
    """

    def __init__(self, disk: DiskThread, peaks: PeaksFile, retry_seconds: float) -> None:
        self.dropped = 0  # lines that were given up
        self._disk = disk
        self._peaks = peaks
        self._retry_seconds = retry_seconds
        self._lock = threading.Lock()  # of what follows; never held while the disk is waited for
        self._waiting: deque[_Line] = deque()
        self._asked = False  # the disk thread has been given the waiting lines, and has not begun with them
        self._tried_at = time.monotonic()

    def put(self, record: Record, sync: bool = False) -> None:
        """Write a record as soon as possible. `sync` asks for fsync with it."""
        event = str(record.get("event"))
        content = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            if event in ("beat", "end"):
                beats = [line for line in self._waiting if line.event == "beat"]
                sync = sync or any(beat.sync for beat in beats)
                self._waiting = deque(line for line in self._waiting if line.event != "beat")
            self._waiting.append(_Line(event, content, sync))
            if len(self._waiting) > MOST_WAITING:
                self._waiting.remove(next((line for line in self._waiting if line.event == "pace"), self._waiting[0]))
                self.dropped += 1
        self._ask()

    def settle(self) -> None:
        """Now and then, try again to write what was refused."""
        if self._waiting and time.monotonic() - self._tried_at >= self._retry_seconds:
            self._ask()

    def finish(self, timeout_seconds: float) -> bool:
        """End: wait for the disk, and try again what it refuses. False if lines are lost."""
        give_up_at = time.monotonic() + timeout_seconds
        while True:
            self._ask()
            if self._disk.finish(max(0.0, give_up_at - time.monotonic())) and not self._waiting:
                return True
            if time.monotonic() + LAST_TRY_SECONDS >= give_up_at:
                return False
            time.sleep(LAST_TRY_SECONDS)

    def _ask(self) -> None:
        self._tried_at = time.monotonic()
        with self._lock:
            asked, self._asked = self._asked, True
        if not asked:
            self._disk.give(self._write)

    def _write(self) -> None:
        """In the disk thread: write all waiting lines, up to the first that is refused."""
        with self._lock:
            self._asked = False
        while True:
            with self._lock:
                if not self._waiting:
                    return
                line = self._waiting.popleft()
            if not self._peaks.append(line.content, line.sync):
                with self._lock:
                    self._waiting.appendleft(line)
                return
