"""Where watched runs are drawn: a whole terminal, given back as it was."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from llmlaunch.report.text import one_line
from llmlaunch.watch.bars import ASCII, BLOCKS, Glyphs, Line
from llmlaunch.watch.frames import one_run, several_runs
from llmlaunch.watch.model import WatchedRun

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

__all__ = ["TerminalView", "can_draw", "frame"]

_ALL_ROWS = 10_000
"""What is left on the terminal at the end may scroll."""


def can_draw() -> bool:
    """Whether stdout is a terminal that can be drawn on."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


def frame(runs: Sequence[WatchedRun], columns: int, rows: int, now: float, glyphs: Glyphs = BLOCKS) -> list[Line]:
    """One run with its GPUs, several with a line each."""
    if len(runs) == 1:
        return one_run(runs[0], columns, rows, now, glyphs)
    return several_runs(runs, columns, rows, now, glyphs)


class TerminalView:
    """Draws on the terminal's other screen, as an editor does; what was there comes back, and the last frame is left
    below it. Ctrl-Z gives the terminal back, too."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console: Console = Console(highlight=False)
        self._live: Live = Live(console=self._console, screen=True, auto_refresh=False)
        self._glyphs = BLOCKS if "utf" in (sys.stdout.encoding or "").lower() else ASCII
        self._drawn: Callable[[int], list[Line]] | None = None
        self._size: tuple[int, ...] | None = None

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """While it is drawn. Whatever ends it, SIGTERM and errors included, the terminal is whole afterwards."""
        try:
            with _given_back(self._live), self._live:
                yield
        finally:
            if self._drawn is not None:
                for line in self._drawn(_ALL_ROWS):
                    self._console.print(_text(line), soft_wrap=True)

    def show(self, looks: object, runs: Sequence[WatchedRun], now: float, trouble: str) -> None:
        self._drawn = functools.partial(self._lines, runs, now, trouble)
        self._draw()

    def idle(self) -> None:
        if self._size != tuple(self._console.size):
            self._draw()

    def _draw(self) -> None:
        from rich.console import Group

        if self._drawn is not None:
            self._size = tuple(self._console.size)
            self._live.update(Group(*map(_text, self._drawn(self._console.height))), refresh=True)

    def _lines(self, runs: Sequence[WatchedRun], now: float, trouble: str, rows: int) -> list[Line]:
        foot: list[Line] = [((one_line(trouble), "yellow"),)] if trouble else []
        return [*frame(runs, self._console.width, rows - len(foot), now, self._glyphs), *foot]


def _text(line: Line) -> Text:
    from rich.text import Text

    parts = [one_line(part) if isinstance(part, str) else (one_line(part[0]), part[1]) for part in line]
    return Text.assemble(*parts, no_wrap=True, overflow="crop")


@contextlib.contextmanager
def _given_back(live: Live) -> Iterator[None]:
    """SIGTSTP and SIGTERM within leave no drawn screen behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, at: FrameType | None) -> None:
        live.stop()
        os.kill(os.getpid(), signal.SIGSTOP)  # comes back here with SIGCONT
        live.start()

    def end(number: int, at: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, what) for number, what in ((signal.SIGTSTP, stop), (signal.SIGTERM, end))}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
