"""One line on stderr for whoever waits at a terminal: what is being done, how far it is, and since when.

It appears after a second, is written over in place, and is gone when the work is done or another line is written. In a
pipe or a log there is none; a terminal that cannot write over a line gets it once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from llmlaunch.progress import heard_by
from llmlaunch.rundir.values import printable
from llmlaunch.units import duration

if TYPE_CHECKING:
    import threading


PATIENCE_SECONDS = 1.0
_BETWEEN_SECONDS = 0.25  # nobody reads faster, and the work has the processor for itself
_FEW = 1000  # so many are counted; of more a share says it better

_lines: list[_WaitingLine] = []
"""The line that is on the terminal now, if any."""


@contextlib.contextmanager
def waiting_for(what: str, patience_seconds: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Show `what` is done meanwhile, and how far it is, once it has taken longer than a person should wait without a
    word. Within another such wait this one is silent: the outer line goes on, and counts what is reported."""
    if _lines or not sys.stderr.isatty():
        yield
        return
    line = _WaitingLine(what, patience_seconds)
    _lines.append(line)
    try:
        with heard_by(line.hear):
            yield
    finally:
        _lines.remove(line)
        line.end()


@contextlib.contextmanager
def waiting_line_erased() -> Iterator[None]:
    """Take the line off the terminal while another is written in its place; it comes back below."""
    if not _lines:
        yield
        return
    with _lines[0].erased():
        yield


class _WaitingLine:
    """A thread that writes the line every quarter of a second until it ends."""

    def __init__(self, what: str, patience_seconds: float) -> None:
        import threading  # only here: every command imports this module

        self._what, self._patience_seconds = what, patience_seconds
        self._since = time.monotonic()
        self._counts: dict[str, str] = {}
        self._shown = False
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread = threading.Thread(target=self._go_on, daemon=True)
        self._thread.start()

    def hear(self, what: str, done: int, total: int) -> None:
        """Keep what is counted outside of it, and forget what was counted within it."""
        names = list(self._counts)
        counts = {name: self._counts[name] for name in names[: names.index(what) if what in names else None]}
        if total > 1:
            counts[what] = f"{done} of {total}" if total <= _FEW else f"{done / total:.0%}"
        self._counts = counts  # whole at once: the thread reads it meanwhile

    @contextlib.contextmanager
    def erased(self) -> Iterator[None]:
        with self._lock:
            if self._shown:
                self._write("\r\x1b[K")
            self._shown = False
            yield

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        with self.erased():
            return

    def _go_on(self) -> None:
        if self._over.wait(self._patience_seconds):
            return
        if os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
            self._write(f"{printable(self._what)} ...\n")
            return
        while not self._over.is_set():
            counts = "".join(f", {what} {share}" for what, share in self._counts.items())
            text = printable(f"{self._what}{counts}, {duration(time.monotonic() - self._since)} ...")
            with self._lock:
                self._write(f"\r{text[: shutil.get_terminal_size().columns - 1]}\x1b[K")
                self._shown = True
            self._over.wait(_BETWEEN_SECONDS)

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
