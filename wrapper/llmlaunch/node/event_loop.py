"""One loop over what may happen to a program of the node side: signals, ends of children, bytes of pipes, timers."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
import traceback
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from .files import say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

CHUNK_BYTES = 2**18
LONGEST_WAIT_SECONDS = 60.0
DRAINED_CHUNKS = 8
"""Of a pipe that is drained: more than one can hold, so that a process that goes on writing cannot keep the loop."""


class EventLoop:
    """Calls `on_signal` for each of `signals`, and `on_child` when a child has ended, never in the midst of other work.

    It must be made in the main thread. A mistake in what it calls is reported and costs that event alone: the ranks,
    which are children of this process, go on.
    """

    def __init__(self, signals: Iterable[int], on_signal: Callable[[int], None], on_child: Callable[[], None]) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._readers: dict[int, Callable[[], bool]] = {}
        self._on_signal, self._on_child = on_signal, on_child
        read, write = os.pipe()
        for end in (read, write):
            os.set_blocking(end, False)
        self._signals, self._wake = read, write
        self._posted: deque[Callable[[], None]] = deque()
        self._selector.register(read, selectors.EVENT_READ, self._take_signals)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (*signals, signal.SIGCHLD):
            signal.signal(number, _heard)  # without a handler of Python's nothing reaches the pipe

    def run(self, is_over: Callable[[], bool], keeps_timers: bool = False) -> None:
        """Take events until `is_over`, which is asked after each. Timers end with the run: one of an attempt must not
        hit the next."""
        while not is_over():
            self._run_timers()
            if is_over():
                break
            for key, _ in self._selector.select(self._seconds_to_wait()):
                if self._selector.get_map().get(key.fd) is key:  # not forgotten by an event before it
                    self._guard(key.data)
        if not keeps_timers:
            self._timers.clear()

    def take_pending(self) -> None:
        self._guard(self._take_signals)

    def post(self, act: Callable[[], None]) -> None:
        """Have the loop call `act`; other threads may ask for that."""
        self._posted.append(act)
        with contextlib.suppress(BlockingIOError):  # it is awake
            os.write(self._wake, b"\0")

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Call `act` once, so many seconds from now."""
        self._timers.append((time.monotonic() + seconds, act))

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        """Call `act` again and again, with so many seconds between two calls."""

        def again() -> None:
            self.after(seconds, again)
            act()

        self.after(seconds, again)

    def read(self, descriptor: int, take: Callable[[bytes], None], on_end: Callable[[], None] | None = None) -> None:
        """Hand the bytes of a pipe to `take` as they come, until its other end is closed. Raises PermissionError for a
        file."""
        os.set_blocking(descriptor, False)

        def take_some() -> bool:
            """Whether there may be more."""
            try:
                data = os.read(descriptor, CHUNK_BYTES)
            except BlockingIOError:
                return False
            if data:
                take(data)
            else:
                self.forget(descriptor)
                if on_end is not None:
                    on_end()
            return bool(data)

        self._selector.register(descriptor, selectors.EVENT_READ, take_some)
        self._readers[descriptor] = take_some

    def drain(self, descriptor: int) -> None:
        """Take what a pipe holds now, and forget it: a process that lives on may keep its other end open."""
        for _ in range(DRAINED_CHUNKS):
            if descriptor not in self._readers or not self._readers[descriptor]():
                break
        self.forget(descriptor)

    def forget(self, descriptor: int) -> None:
        if self._readers.pop(descriptor, None) is not None:
            self._selector.unregister(descriptor)

    def _take_signals(self) -> None:
        try:
            numbers = os.read(self._signals, 4096)
        except BlockingIOError:
            return
        for number in numbers:
            if number == 0:
                continue
            if number == signal.SIGCHLD:
                self._guard(self._on_child)
            else:
                self._guard(partial(self._on_signal, number))
        while self._posted:
            self._guard(self._posted.popleft())

    def _run_timers(self) -> None:
        now = time.monotonic()
        due = [act for at, act in self._timers if at <= now]
        self._timers = [timer for timer in self._timers if timer[0] > now]
        for act in due:
            self._guard(act)

    def _seconds_to_wait(self) -> float:
        next_at = min((at for at, _ in self._timers), default=time.monotonic() + LONGEST_WAIT_SECONDS)
        return max(0.0, next_at - time.monotonic())

    def _guard(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception:
            say(f"a mistake of llmlaunch itself, which the training does not notice: {traceback.format_exc()}")


def _heard(number: int, frame: object) -> None:
    """What a signal does by itself: nothing. The loop reads its number from the pipe."""
