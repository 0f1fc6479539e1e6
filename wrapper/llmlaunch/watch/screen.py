"""Lines for somebody who watches: on a terminal the last ones are written over in place; nowhere do they tear.

Whoever watches may go away (a closed terminal, an ended `head`): then writing fails, and what that means is for the
caller to say.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TextIO

from llmlaunch.errors import OutputLost
from llmlaunch.report.terminal import filled
from llmlaunch.report.text import one_line
from llmlaunch.rundir.values import printable


class Screen:
    """`say` writes lines that stay; `show` lines that the next words replace: on a terminal alone, elsewhere they are
    left out. Where a command's stdout cannot be written any more, it raises OutputLost; with `lasting` the screen falls
    silent instead, and says so on stderr where the disk is full."""

    def __init__(self, stream: TextIO, lasting: bool = False) -> None:
        self.live = stream.isatty()
        self.gone = False
        self._stream = stream
        self._lasting = lasting
        self._shown: list[str] = []

    @property
    def width(self) -> int | None:
        """How many columns a line can have on the terminal; None where nothing has to fit."""
        return shutil.get_terminal_size().columns - 1 if self.live else None

    def say(self, text: str) -> None:
        self._write(f"{self._erased()}{printable(text)}\n")

    def say_folded(self, text: str) -> None:
        """Write a sentence, in lines that break between words where the terminal is narrower."""
        self.say("\n".join(filled(text, self.width, others="  ")))

    def show(self, lines: Sequence[str]) -> None:
        if not self.live:
            return
        columns, rows = shutil.get_terminal_size()
        fitting = list(lines) if len(lines) < rows else [*lines[: rows - 2], f"... and {len(lines) - rows + 2} more"]
        cut = [one_line(line)[: columns - 1] for line in fitting]
        if cut != self._shown:
            text = self._erased() + "".join(f"{line}\n" for line in cut)
            self._shown = cut
            self._write(text)

    def clear(self) -> None:
        if self._shown:
            self._write(self._erased())

    def _erased(self) -> str:
        lines, self._shown = len(self._shown), []
        return f"\x1b[{lines}F\x1b[J" if lines else ""

    def _write(self, text: str) -> None:
        if self.gone:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except OutputLost as lost:
            self.gone = True
            if not self._lasting:
                raise
            if not lost.reader_gone and self._stream is not sys.stderr:
                sys.stderr.write(f"warning: {lost}; the run goes on\n")


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
