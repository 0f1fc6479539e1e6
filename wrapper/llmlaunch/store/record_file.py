"""A file of measurement records, in JSON Lines or CSV, read strictly: what is not right is said by line."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmlaunch.errors import UserError
from llmlaunch.rundir.files import read_bytes
from llmlaunch.store.record_csv import BadCell, path_of, record_of
from llmlaunch.store.record_text import BadRecord, Line, dump, line_of, same_content

__all__ = ["BadLine", "RecordFile", "is_csv", "read_records"]

_MOST_BYTES = 2**30
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class BadLine:
    """Line `number` of a file, and what is wrong with it."""

    number: int
    why: str


@dataclass(frozen=True)
class RecordFile:
    """The good records of a file, and its bad lines."""

    lines: tuple[Line, ...]
    bad: tuple[BadLine, ...] = ()


def is_csv(path: Path, form: str | None) -> bool:
    """`form` is "csv", "jsonl" or None: then the name's ending says it."""
    return form == "csv" if form is not None else path.suffix.lower() == ".csv"


def read_records(path: Path, form: str | None = None, skip_bad: bool = False) -> RecordFile:
    """Every record of the file; empty lines are skipped.

    Raises UserError where it cannot be read, or holds no headings; and, unless `skip_bad`, naming the first bad line:
    not UTF-8, not JSON, NaN or Infinity, a key twice, not an object, no usable `id`, a peak that is no byte count, two
    different records with one id.
    """
    try:
        data = read_bytes(path, _MOST_BYTES, follow=True).removeprefix(_BOM)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    found: dict[str, Line] = {}
    lines: list[Line] = []
    bad: list[BadLine] = []
    for one in _csv_lines(path, data) if is_csv(path, form) else _json_lines(data):
        read = one if isinstance(one, BadLine) else _unless_twice(found, one)
        if isinstance(read, Line):
            lines.append(read)
        elif skip_bad:
            bad.append(read)
        else:
            raise UserError(f"{path}, line {read.number}: {read.why}; nothing was imported")
    return RecordFile(tuple(lines), tuple(bad))


def _unless_twice(found: dict[str, Line], line: Line) -> Line | BadLine:
    first = found.setdefault(line.id, line)
    if same_content(first.content, line.content):
        return line
    return BadLine(
        line.number,
        f"the id {line.id!r} is already on line {first.number} with other content; give each record an id of its own",
    )


def _json_lines(data: bytes) -> Iterator[Line | BadLine]:
    for number, raw in enumerate(data.split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            yield line_of(number, raw)
        except BadRecord as error:
            yield BadLine(number, str(error))


def _csv_lines(path: Path, data: bytes) -> Iterator[Line | BadLine]:
    """A row may take several lines; it is named by its first."""
    csv.field_size_limit(max(csv.field_size_limit(), len(data)))
    # What is not UTF-8 stays visible, and makes its row a bad one.
    table = csv.reader(io.StringIO(data.decode(errors="surrogateescape"), newline=""), strict=True)
    columns = None
    while True:
        number = table.line_num + 1
        try:
            row = next(table)
            if not any(row):
                continue
            if any("\udc80" <= character <= "\udcff" for cell in row for character in cell):
                raise BadCell("not UTF-8 text")
            if columns is None:
                columns = _columns(path, row)
            else:
                yield line_of(number, dump(record_of(columns, row)).encode())
        except StopIteration:
            return
        except (csv.Error, BadCell, BadRecord) as error:
            if columns is None:
                raise UserError(f"{path}, line {number}: {error}; nothing was imported") from None
            yield BadLine(number, str(error))


def _columns(path: Path, headings: list[str]) -> list[tuple[str, ...]]:
    columns = [path_of(heading) for heading in headings]
    if ("id",) not in columns:
        raise UserError(f"{path}: the first line names no column `id`; nothing was imported")
    if len(set(columns)) != len(columns):
        twice = next(heading for heading, path in zip(headings, columns, strict=True) if columns.count(path) > 1)
        raise UserError(f"{path}: two columns are named {twice[:60]!r}; nothing was imported")
    return columns
