"""A terminal that rich draws on, and that is given back as it was."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TextIO

from rich.console import Console
from rich.live import Live

from llmlaunch.watch.frames import RunsFrame
from llmlaunch.watch.loop import View
from llmlaunch.watch.model import WatchedRun


def live_view(stream: TextIO, screen: bool) -> Live:
    """Return a view that is drawn when it is updated: on the terminal's other screen, or else below what was printed.
    It is erased at its end."""
    console = Console(file=stream, highlight=False, markup=False, emoji=False, force_terminal=True)
    return Live(console=console, screen=screen, auto_refresh=False, transient=True)


class TerminalView(View):
    """Draws on the terminal's other screen, as an editor does; what was there comes back, and the last frame is left
    below it."""

    def __init__(self) -> None:
        self._live = live_view(sys.stdout, screen=True)
        self._frame: RunsFrame | None = None
        self._size = self._live.console.size

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """While it is drawn. Whatever ends it, SIGTERM and errors included, the terminal is whole afterwards."""
        try:
            with drawn(self._live):
                yield
        finally:
            if self._frame is not None:
                self._live.console.print(self._frame)

    def show(self, looks: object, runs: Sequence[WatchedRun], now: float, trouble: str) -> None:
        self._frame, self._size = RunsFrame(runs, now, trouble), self._live.console.size
        self._live.update(self._frame, refresh=True)

    def idle(self) -> None:
        if self._size != self._live.console.size:
            self._size = self._live.console.size
            self._live.refresh()


@contextlib.contextmanager
def drawn(live: Live) -> Iterator[Live]:
    """The view is drawn within; SIGTERM leaves nothing of it behind, and Ctrl-Z gives the terminal back meanwhile."""
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            stack.enter_context(_signals(live))
        with live:
            yield live


@contextlib.contextmanager
def _signals(live: Live) -> Iterator[None]:
    def stop(number: int, at: FrameType | None) -> None:
        live.stop()
        os.kill(os.getpid(), signal.SIGSTOP)  # comes back here with SIGCONT
        live.start(refresh=True)

    def end(number: int, at: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, what) for number, what in ((signal.SIGTSTP, stop), (signal.SIGTERM, end))}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
