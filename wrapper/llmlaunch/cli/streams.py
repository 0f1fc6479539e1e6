"""stdin, stdout and stderr as every command finds them, whatever a shell made of them.

stdout holds the result: where it cannot be written (`| head`, a full disk), the command ends with `OutputLost`. stderr
holds words beside it: where they cannot be written, the command goes on without them. One that was closed (`>&-`) is
/dev/null: its number must not go to the next file that is opened, into which others would then write.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast

from llmlaunch.errors import OutputLost

__all__ = ["standard_streams"]


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Make the standard streams usable, and restore them at the end."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
    before = sys.stdout, sys.stderr
    out, err = (stream or _void(number) for number, stream in ((1, sys.stdout), (2, sys.stderr)))
    if hasattr(out, "reconfigure"):
        # a file's name need not be text, and a terminal's alphabet need not have our signs
        out.reconfigure(errors="backslashreplace")
    sys.stdout = cast("TextIO", _Stream(out, _raise))
    sys.stderr = cast("TextIO", _Stream(err, lambda _: None))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _void(number: int) -> TextIO:
    return open(number, "w", encoding="utf-8", closefd=False)


def _raise(failure: OSError) -> None:
    raise OutputLost(failure) from failure


class _Stream:
    """A text stream whose failing writes are handed to `failed`; what its buffers still hold is thrown away."""

    def __init__(self, stream: TextIO, failed: Callable[[OSError], None]) -> None:
        self._stream, self._failed = stream, failed

    def write(self, text: str) -> int:
        if text != "":  # click tries a stream out with nothing, and hears no answer
            self._tried(lambda: self._stream.write(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._tried(self._stream.flush)

    def _tried(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as failure:
            into_the_void(self._stream)
            self._failed(failure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def into_the_void(stream: TextIO) -> None:
    """Make /dev/null of a stream that cannot be written, or what is left in its buffers would fail again at exit."""
    with contextlib.suppress(OSError, ValueError):
        void = os.open(os.devnull, os.O_WRONLY)
        os.dup2(void, stream.fileno())
        os.close(void)
