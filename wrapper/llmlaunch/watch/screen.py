"""Lines for somebody who watches: on a terminal rich draws the last ones in place; nowhere do they tear.

Whoever watches may go away (a closed terminal, an ended `head`): then writing fails, and what that means is for the
caller to say.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from llmlaunch.errors import OutputLost
from llmlaunch.report.terminal import filled
from llmlaunch.report.text import one_line
from llmlaunch.rundir.values import printable

if TYPE_CHECKING:
    from rich.live import Live


def can_draw(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


class Screen:
    """`say` writes lines that stay. `show` writes lines that the next ones replace, on a terminal that can be drawn on
    and while `in_place` lasts; elsewhere they are left out. Where a command's stdout cannot be written any more, it
    raises OutputLost; with `lasting` the screen falls silent instead, and says so on stderr where the disk is full."""

    def __init__(self, stream: TextIO, lasting: bool = False) -> None:
        self.live = can_draw(stream)
        self.gone = False
        self._stream = stream
        self._lasting = lasting
        self._view: Live | None = None
        self._shown = ""

    @property
    def width(self) -> int | None:
        """How many columns a line can have on the terminal; None where nothing has to fit."""
        return shutil.get_terminal_size().columns - 1 if self.live else None

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, a terminal has the lines of `show` below all others. They are erased at the end."""
        with contextlib.ExitStack() as stack:
            if self.live:
                from llmlaunch.watch.frames import drawn, live_view

                with self._outliving_its_reader():
                    self._view = stack.enter_context(drawn(live_view(self._stream, screen=False)))
            try:
                yield
            finally:
                self._view, self._shown = None, ""
                with self._outliving_its_reader():
                    stack.close()

    def say(self, text: str) -> None:
        if self.gone:
            return
        with self._outliving_its_reader():
            if self._view is not None:
                self._view.console.print(printable(text), soft_wrap=True)
            else:
                self._stream.write(f"{printable(text)}\n")
                self._stream.flush()

    def say_folded(self, text: str) -> None:
        """Write a sentence, in lines that break between words where the terminal is narrower."""
        self.say("\n".join(filled(text, self.width, others="  ")))

    def show(self, lines: Sequence[str]) -> None:
        if self._view is None or self.gone:
            return
        rows = self._view.console.height
        fitting = lines if len(lines) < rows else [*lines[: rows - 2], f"... and {len(lines) - rows + 2} more"]
        text = "\n".join(map(one_line, fitting))
        if text == self._shown:
            return
        from rich.text import Text

        self._shown = text
        with self._outliving_its_reader():
            self._view.update(Text(text, no_wrap=True, overflow="crop"), refresh=True)

    @contextlib.contextmanager
    def _outliving_its_reader(self) -> Iterator[None]:
        try:
            yield
        except OutputLost as lost:
            if not self._lasting:
                raise
            if not self.gone and not lost.reader_gone and self._stream is not sys.stderr:
                sys.stderr.write(f"warning: {lost}; the run goes on\n")
            self.gone = True


@contextlib.contextmanager
def outliving_the_terminal() -> Iterator[None]:
    """A closed terminal (SIGHUP) does not end this program within; its writing may fail from then on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
