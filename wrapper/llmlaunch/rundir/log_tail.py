"""The new lines of a file that others append to: a log, or a monitor's file."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from .files import open_regular

if TYPE_CHECKING:
    from pathlib import Path
    from re import Pattern

__all__ = ["LogTail"]

LINE_END = re.compile(rb"\n")


class LogTail:
    """Each call of `lines` returns the lines completed since the call before. Nothing is raised for a file that does
    not exist yet, is cut, replaced or unreadable.

    A call reads at most `most_bytes`. What is there beyond is read by the next call; with `skips` it is left out, and
    reading goes on with the first whole line of the last `most_bytes`. A longer line than `longest_line` is cut.
    """

    def __init__(
        self,
        path: Path,
        most_bytes: int,
        longest_line: int,
        skips: bool = False,
        line_end: Pattern[bytes] = LINE_END,
        offset: int = 0,
    ) -> None:
        self.path = path
        self.offset = offset
        self._most_bytes = most_bytes
        self._longest_line = longest_line
        self._skips = skips
        self._line_end = line_end
        self._inode: int | None = None
        self._torn = b""  # the start of a line whose end is not written yet
        self._in_skipped_line = False

    def lines(self) -> list[bytes]:
        # Opened anew each time: that is when a network file system asks the server for the file's true length.
        try:
            with open_regular(self.path) as file:
                state = os.fstat(file.fileno())
                if self._inode not in (None, state.st_ino) or state.st_size < self.offset:
                    self._begin_again()
                self._inode = state.st_ino
                if self._skips and state.st_size - self.offset > self._most_bytes:
                    self.offset, self._torn, self._in_skipped_line = state.st_size - self._most_bytes, b"", True
                file.seek(self.offset)
                chunk = file.read(self._most_bytes) or b""
        except OSError:
            return []
        self.offset += len(chunk)
        if self._in_skipped_line:
            line_end = self._line_end.search(chunk)
            if line_end is None:
                return []
            chunk, self._in_skipped_line = chunk[line_end.end() :], False
        *lines, torn = self._line_end.split(self._torn + chunk)
        self._torn = torn[: self._longest_line]
        return [line[: self._longest_line] for line in lines]

    def rest(self) -> bytes:
        """Return a last line that was never ended; empty where there is none."""
        line, self._torn = self._torn, b""
        return line

    def _begin_again(self) -> None:
        self.offset, self._torn, self._in_skipped_line = 0, b"", False
