"""The one thread that touches the run directory. Its file server may be gone, and then a call hangs: nobody waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING

from .files import say

if TYPE_CHECKING:
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
