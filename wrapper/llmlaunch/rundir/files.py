"""Reads what anybody may have put into a run directory, as `regular_files.py` opens it. Writes small files whole or not
at all: a reader sees the old file or the new one, never half of it.

A text of 200,000 brackets exhausts Python's stack, and 1e400 becomes an infinity that no integer can hold. Everything
that reads a run directory reads it with this module.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from . import file_names
from .regular_files import MOST_BYTES, open_regular, read_bytes
from .values import is_run_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from re import Pattern
    from typing import BinaryIO

MOST_LINE_BYTES = 4 * 2**20
"""Limit for one line that a program wrote. A monitor's line has some 3 KiB for eight GPUs."""

MOST_APPENDED_BYTES = 4 * 2**30
"""Limit for a file that is read line by line. A monitor appends some 25 MB a day."""

_ID_BYTES = 4096
_MOST_DEPTH = 32
"""Limit for nested lists and objects. Our own files nest to about 8; what is read must also be writable again."""

_INT64 = 2**63
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


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
    return object_of(read_bytes(path))


class AppendedRecords(NamedTuple):
    """The JSON objects of a file, in its order; `lost` is the number of lines that hold none."""

    records: list[dict[str, Any]]
    lost: int


def appended_records(path: Path) -> AppendedRecords:
    """Return the records of a file to which each was appended on a line of its own. Raises OSError as `open_regular`
    does, and for more than MOST_APPENDED_BYTES."""
    records, lost = [], 0
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > MOST_APPENDED_BYTES:
            raise OSError(errno.EFBIG, "Larger than any file of records", str(path))
        for line in bounded_lines(file):
            if line == b"\n":
                continue
            try:
                records.append(object_of(line))
            except ValueError:
                lost += 1
    return AppendedRecords(records, lost)


def object_of(content: bytes) -> dict[str, Any]:
    """The JSON object of a text. Raises ValueError where it is none, or nested too deeply."""
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


def create(path: Path, text: str) -> bool:
    """Create `path` with `text`; False, and nothing changed, where it exists. Raises OSError."""
    temporary = _written(path, text.encode(), lasting=True)
    try:
        # link, unlike rename, fails where the name is taken; it is atomic on NFS too.
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        _remove(temporary)
    return True


def replace_json(path: Path, record: Mapping[str, Any], lasting: bool = True) -> None:
    """Write `record` over whatever `path` is, whose folder is made where it is missing. Raises OSError.

    Not `lasting`: a power cut may lose it, and nobody waits for the disk.
    """
    replace_bytes(path, json_bytes(record), lasting)


def json_bytes(record: Mapping[str, Any]) -> bytes:
    """Return the content of a file that holds `record`."""
    return json.dumps(record, indent=1).encode() + b"\n"


def replace_bytes(path: Path, content: bytes, lasting: bool = True) -> None:
    """Write `content` in the same way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _written(path, content, lasting)
    try:
        temporary.replace(path)
    except OSError:
        _remove(temporary)
        raise


def _written(path: Path, content: bytes, lasting: bool) -> Path:
    """Return a hidden file beside `path` that holds `content`; none is left where it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
    except OSError:
        _remove(temporary)
        raise
    return temporary


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


LINE_END = re.compile(rb"\n")


class LogTail:
    """Each call of `lines` returns the lines completed since the call before. Nothing is raised for a file that does
    not exist yet, is cut, replaced or unreadable.

    A call reads at most `most_bytes`. What is there beyond is read by the next call; with `skips` it is left out, and
    reading goes on with the first whole line of the last `most_bytes`. A longer line than `longest_line` is cut.

    `same_node`: whoever writes the file is a process of this node. It then stays open, since a read sees what such a
    process wrote, and the server of a shared file system is asked no more. That it was cut or replaced is not noticed.
    With `creates` it is made where it is missing, and not looked for again and again.
    """

    def __init__(
        self,
        path: Path,
        most_bytes: int,
        longest_line: int,
        skips: bool = False,
        line_end: Pattern[bytes] = LINE_END,
        offset: int = 0,
        same_node: bool = False,
        creates: bool = False,
    ) -> None:
        self.path = path
        self.offset = offset
        self._most_bytes = most_bytes
        self._longest_line = longest_line
        self._skips = skips
        self._line_end = line_end
        self._same_node = same_node
        self._creates = creates
        self._descriptor = -1  # that stays open
        self._inode: int | None = None
        self._torn = b""  # the start of a line whose end is not written yet
        self._in_skipped_line = False

    def lines(self) -> list[bytes]:
        try:
            chunk = self._chunk_on_this_node() if self._same_node else self._chunk()
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

    def _chunk(self) -> bytes:
        # Opened anew each time: that is when a network file system asks the server for the file's true length.
        with open_regular(self.path) as file:
            state = os.fstat(file.fileno())
            if self._inode not in (None, state.st_ino) or state.st_size < self.offset:
                self._begin_again()
            self._inode = state.st_ino
            self._skip_to(state.st_size)
            file.seek(self.offset)
            return file.read(self._most_bytes) or b""

    def _chunk_on_this_node(self) -> bytes:
        if self._descriptor < 0:
            # O_NONBLOCK: a FIFO has nothing to read, and nobody waits for it
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | os.O_NOFOLLOW
            self._descriptor = os.open(self.path, flags | (os.O_CREAT if self._creates else 0), 0o666)
        try:
            self._skip_to(os.lseek(self._descriptor, 0, os.SEEK_END))
            return os.pread(self._descriptor, self._most_bytes, self.offset)
        except OSError:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1
            raise

    def _skip_to(self, end: int) -> None:
        if self._skips and end - self.offset > self._most_bytes:
            self.offset, self._torn, self._in_skipped_line = end - self._most_bytes, b"", True

    def rest(self) -> bytes:
        """Return a last line that was never ended; empty where there is none."""
        line, self._torn = self._torn, b""
        return line

    def _begin_again(self) -> None:
        self.offset, self._torn, self._in_skipped_line = 0, b"", False
