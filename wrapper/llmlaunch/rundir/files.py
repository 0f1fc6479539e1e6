"""Reads files that anybody may have put into a run directory: regular files alone, within bounds, without waiting.

Opening a FIFO waits for a writer, and /dev/zero has no end; a text of 200,000 brackets exhausts Python's stack, and
1e400 becomes an infinity that no integer can hold. Everything that reads a run directory reads it with this module.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from typing import TYPE_CHECKING, Any

from . import file_names
from .identifiers import is_run_id

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

__all__ = [
    "MOST_APPENDED_BYTES",
    "MOST_BYTES",
    "bounded_lines",
    "object_in",
    "open_regular",
    "parse_json",
    "read_bytes",
    "read_object",
    "read_run_id",
    "read_tail",
    "read_text",
]

MOST_BYTES = 32 * 2**20
"""Limit for a file read whole. status.json is the largest: some 600 bytes for each rank, 10 MiB for 16,000 of them."""

MOST_LINE_BYTES = 4 * 2**20
"""Limit for one line that a program wrote. A monitor's line has some 3 KiB for eight GPUs."""

MOST_APPENDED_BYTES = 4 * 2**30
"""Limit for a file that is read line by line. A monitor appends some 25 MB a day."""

_ID_BYTES = 4096
_MOST_DEPTH = 32
"""Limit for nested lists and objects. Our own files nest to about 8; what is read must also be writable again."""

_INT64 = 2**63
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def open_regular(path: Path, follow: bool = False) -> BinaryIO:
    """Open a regular file for reading bytes. A symbolic link is refused unless `follow`.

    Raises:
        OSError: the file is missing, unreadable, a link, or anything but a regular file.
    """
    # O_NONBLOCK: opening a FIFO returns at once. O_NOCTTY: a terminal does not become this process's own.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except ValueError as error:  # a NUL byte or a lone surrogate in the path
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    try:
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(kind):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(kind):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path, most_bytes: int = MOST_BYTES, follow: bool = False) -> bytes:
    """The content of a regular file. Raises OSError as `open_regular` does, and for more than `most_bytes`."""
    with open_regular(path, follow) as file:
        if os.fstat(file.fileno()).st_size <= most_bytes:
            content = file.read(most_bytes + 1) or b""  # it may have grown since
            if len(content) <= most_bytes:
                return content
    raise OSError(errno.EFBIG, "Larger than the %g MiB allowed here" % (most_bytes / 2**20), str(path))


def read_tail(path: Path, most_bytes: int, follow: bool = False) -> bytes:
    """The last bytes of a regular file of any size. Raises OSError as `open_regular` does."""
    with open_regular(path, follow) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most_bytes))
        return file.read(most_bytes) or b""


def bounded_lines(file: BinaryIO, most_bytes: int = MOST_LINE_BYTES) -> Iterator[bytes]:
    """The lines of a file, each with its end. Of a longer one the first `most_bytes` stand for it."""
    while True:
        line = file.readline(most_bytes)
        if not line:
            return
        yield line
        while len(line) == most_bytes and not line.endswith(b"\n"):
            line = file.readline(most_bytes)


def read_text(path: Path, most_bytes: int = MOST_BYTES, follow: bool = False) -> str:
    """The same as text, damaged UTF-8 replaced."""
    return read_bytes(path, most_bytes, follow).decode("utf-8", errors="replace")


def read_run_id(run_dir: Path) -> str | None:
    """What `run.id` holds; None where it is absent, or holds no id."""
    try:
        run_id = read_text(run_dir / file_names.RUN_ID, _ID_BYTES).partition("\n")[0].strip()
    except OSError:
        return None
    return run_id if is_run_id(run_id) else None


def parse_json(text: bytes) -> Any:
    """The value of a JSON text. A number that is not finite, or an integer that does not fit 64 bits, becomes None; a
    lone surrogate, which no file, terminal or database takes, becomes "?".

    Raises ValueError for what is no JSON or no UTF-8, and for nesting that exhausts the stack.
    """
    try:
        encoding = json.detect_encoding(text)
        is_plain = encoding == "utf-8" and _MANY_DIGITS not in text.translate(_DIGITS)
        value = (_DECODER if is_plain else _BOUNDING_DECODER).decode(text.decode(encoding, "surrogatepass"))
        return _encodable(value) if _SURROGATE.search(text) else value
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`; None where there is none to read: missing, damaged, half written, not regular."""
    try:
        return object_in(path)
    except (OSError, ValueError):
        return None


def object_in(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises OSError as `read_bytes` does, and ValueError where it holds none, or one that
    is nested too deeply."""
    content = read_bytes(path)
    value = parse_json(content)
    if not isinstance(value, dict):
        raise ValueError("is no JSON object")
    if content.count(b"[") + content.count(b"{") > _MOST_DEPTH and _depth(value) > _MOST_DEPTH:
        raise ValueError("nested too deeply")
    return value


def _depth(value: Any) -> int:
    """How many lists and objects enclose the innermost one, itself included; level by level, not by recursion."""
    depth, level = 0, [value]
    while level and depth <= _MOST_DEPTH:
        depth += 1
        items = [list(outer.values()) if isinstance(outer, dict) else outer for outer in level]
        level = [item for listed in items for item in listed if isinstance(item, (dict, list))]
    return depth


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return value


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def _int64(text: str) -> int | None:
    """Python refuses 4,301 digits, and a database 20."""
    number = int(text) if len(text) <= 20 else _INT64
    return number if -_INT64 <= number < _INT64 else None


def _no_number(_: str) -> None:
    """NaN, Infinity and -Infinity, which are no JSON."""


# Calling back for every integer takes longer than all the rest, and few files hold one of so many digits.
_DIGITS = bytes(ord("0") if ord("0") <= byte <= ord("9") else ord(" ") for byte in range(256))
_MANY_DIGITS = b"0" * 19
_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_no_number)
_BOUNDING_DECODER = json.JSONDecoder(parse_float=_finite, parse_int=_int64, parse_constant=_no_number)
