"""A measurement record as text: it is read strictly, kept as it was written, and compared by content.

The store keeps the line of each record, so an export is the same JSON to the last digit and key. Two texts are equal if
they parse to the same values and types: the order of keys, white space and the spelling of a number (1e3, 1000.0) do
not matter, but 12 and 12.0 differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmlaunch.documents.json_strict import strict_object
from llmlaunch.errors import UserError
from llmlaunch.rundir.regular_files import read_bytes

_INT64 = 2**63
_NOTHING = object()
_OWN = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True)
class RecordLine:
    """One record of a file: its line number, its text and its content."""

    number: int
    content: str
    record: dict[str, Any]

    @property
    def id(self) -> str:
        return str(self.record["id"])


def dump(record: Mapping[str, Any]) -> str:
    """Return one of our own records as one line."""
    return _OWN.encode(record)


def dump_all(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return our own records, each with an id of its own, as one line each. Records of one run share most of their
    values, as the same objects, and these are encoded once."""
    texts = []
    before: Mapping[str, Any] = {}
    shared: dict[str, Any] = {}
    shared_text = ""
    for record in records:
        own = {key: value for key, value in record.items() if shared.get(key, _NOTHING) is not value}
        if shared and len(own) + len(shared) == len(record):
            texts.append(f"{_OWN.encode(own)[:-1]},{shared_text}")
        else:
            texts.append(_OWN.encode(record))
            shared = {key: value for key, value in record.items() if before.get(key, _NOTHING) is value}
            shared_text = _OWN.encode(shared)[1:]
        before = record
    return texts


def same_content(content: str, other: str) -> bool:
    return content == other or _canonical(content) == _canonical(other)


def columns(record: Mapping[str, Any]) -> dict[str, str | int | float | None]:
    """Return the values by which the store can search; None if the record has no plain value for one."""
    row: dict[str, str | int | float | None] = {
        key: _text(record.get(key)) for key in ("family", "backend", "gpu", "peak_kind", "run_id", "attempt")
    }
    row["pipeline_rank"] = _integer(record.get("pipeline_rank"))
    row["peak_bytes"] = _integer(record.get("peak_bytes"))
    started = record.get("started_at")
    row["started_at"] = started if isinstance(started, float) else _integer(started)
    return row


class BadRecord(Exception):
    """Raised for a line that is not a measurement record. The message is the reason, without the place."""


def record_line(number: int, raw: bytes) -> RecordLine:
    """Return the record in one line. Raises BadRecord."""
    try:
        content = raw.decode().strip()
    except UnicodeDecodeError as error:
        raise BadRecord(f"not UTF-8 text (byte {error.start + 1})") from None
    try:
        record = strict_object(content)
    except json.JSONDecodeError as error:
        raise BadRecord(f"not JSON: {error.msg}, column {error.colno}") from None
    except RecursionError:
        raise BadRecord("not a measurement record: nested too deeply") from None
    except TypeError:
        raise BadRecord("a measurement record is a JSON object") from None
    except ValueError as error:
        raise BadRecord(str(error)) from None
    _check(record)
    return RecordLine(number, content, record)


def _check(record: dict[str, Any]) -> None:
    if "id" not in record:
        raise BadRecord("the record has no `id`")
    identifier = record["id"]
    if not _text(identifier):
        raise BadRecord("`id` must be a non-empty text of ordinary characters")
    peak = record.get("peak_bytes")
    if peak is not None and (type(peak) is not int or not 0 <= peak < _INT64):
        raise BadRecord(f"`peak_bytes` of {identifier!r} must be a whole number of bytes, not negative, or null")


def _canonical(content: str) -> str:
    return json.dumps(json.loads(content), sort_keys=True, separators=(",", ":"))


def _text(value: object) -> str | None:
    """Return a string that every database can hold (no NUL, no half of a surrogate pair), or None for any other
    value."""
    if not isinstance(value, str) or "\0" in value:
        return None
    if value.isascii():
        return value
    return None if any("\ud800" <= c <= "\udfff" for c in value) else value


def _integer(value: object) -> int | None:
    return value if type(value) is int and -_INT64 <= value < _INT64 else None


_MOST_BYTES = 2**30
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class BadLine:
    """The RecordLine `number` of a file, and what is wrong with it."""

    number: int
    why: str


@dataclass(frozen=True)
class RecordFile:
    """The good records of a file, and its bad lines."""

    lines: tuple[RecordLine, ...]
    bad: tuple[BadLine, ...] = ()


def read_records(path: Path, skip_bad: bool = False) -> RecordFile:
    """Return every record in the file. Empty lines are skipped.

    Raises UserError if the file cannot be read. Unless `skip_bad`, it also raises UserError for the first bad line: not
    UTF-8, not strict JSON (`documents.json_strict`), not an object, no usable `id`, a peak that is not a byte count, or
    two different records with one id.
    """
    try:
        data = read_bytes(path, _MOST_BYTES, follow=True).removeprefix(_BOM)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    by_id: dict[str, RecordLine] = {}
    lines: list[RecordLine] = []
    bad: list[BadLine] = []
    for line in _json_lines(data):
        checked = line if isinstance(line, BadLine) else _unless_twice(by_id, line)
        if isinstance(checked, RecordLine):
            lines.append(checked)
        elif skip_bad:
            bad.append(checked)
        else:
            raise UserError(f"{path}, line {checked.number}: {checked.why}; nothing was imported")
    return RecordFile(tuple(lines), tuple(bad))


def _unless_twice(by_id: dict[str, RecordLine], line: RecordLine) -> RecordLine | BadLine:
    first = by_id.setdefault(line.id, line)
    if same_content(first.content, line.content):
        return line
    return BadLine(
        line.number,
        f"the id {line.id!r} is already on line {first.number} with other content; give each record an id of its own",
    )


def _json_lines(data: bytes) -> Iterator[RecordLine | BadLine]:
    for number, raw in enumerate(data.split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            yield record_line(number, raw)
        except BadRecord as error:
            yield BadLine(number, str(error))
