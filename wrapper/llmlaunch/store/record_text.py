"""A measurement record as text: read it strictly, keep it as it was written, compare by content.

The store keeps each record's own line, so an export is the same JSON to the last digit and key. Two texts are equal
when they parse to the same values and types: the order of keys, white space and the spelling of a number (1e3,
1000.0) do not count, 12 and 12.0 differ.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmlaunch.errors import UserError

__all__ = ["Line", "columns", "dump", "parse_file", "same_content"]

_INT64 = 2**63


@dataclass(frozen=True)
class Line:
    """One record of a file: where it stood, its text, and what it says."""

    number: int
    content: str
    record: dict[str, Any]

    @property
    def id(self) -> str:
        return str(self.record["id"])


def parse_file(path: Path) -> list[Line]:
    """Every record of a JSON Lines file; empty lines are skipped.

    Raises UserError naming file and line: unreadable, not UTF-8, not JSON, NaN or Infinity, a key twice, not an
    object, no usable `id`, a peak that is no byte count, two different records with one id.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    found: dict[str, Line] = {}
    lines = []
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            line = _line(number, raw)
        except _Bad as bad:
            raise UserError(f"{path}, line {number}: {bad}; nothing was imported") from None
        first = found.setdefault(line.id, line)
        if not same_content(first.content, line.content):
            raise UserError(
                f"{path}, line {number}: the id {line.id!r} is already on line {first.number} with other content; "
                "give each record an id of its own; nothing was imported"
            )
        lines.append(line)
    return lines


def dump(record: dict[str, Any]) -> str:
    """A record of our own as one line."""
    return json.dumps(record, separators=(",", ":"), allow_nan=False)


def same_content(one: str, other: str) -> bool:
    return one == other or _canonical(one) == _canonical(other)


def columns(record: dict[str, Any]) -> dict[str, str | int | float | None]:
    """What the store can be asked for, where the record has a plain value of it."""
    row: dict[str, str | int | float | None] = {
        key: _text(record.get(key)) for key in ("family", "backend", "gpu", "peak_kind", "run_id", "attempt")
    }
    row["pipeline_rank"] = _integer(record.get("pipeline_rank"))
    row["peak_bytes"] = _integer(record.get("peak_bytes"))
    started = record.get("started_at")
    row["started_at"] = started if isinstance(started, float) else _integer(started)
    return row


class _Bad(Exception):
    """What is wrong with one line, without its place."""


def _line(number: int, raw: bytes) -> Line:
    try:
        content = raw.decode().strip()
    except UnicodeDecodeError as error:
        raise _Bad(f"not UTF-8 text (byte {error.start + 1})") from None
    try:
        record = json.loads(content, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise _Bad(f"not JSON: {error.msg}, column {error.colno}") from None
    except RecursionError:
        raise _Bad("not a measurement record: nested too deeply") from None
    except ValueError as error:  # an integer of more digits than Python reads
        raise _Bad(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise _Bad(f"a measurement record is a JSON object, not {_JSON_NAMES[type(record)]}")
    _check(record)
    return Line(number, content, record)


def _check(record: dict[str, Any]) -> None:
    if "id" not in record:
        raise _Bad("the record has no `id`")
    identifier = record["id"]
    if not _text(identifier):
        raise _Bad("`id` must be a non-empty text of ordinary characters")
    peak = record.get("peak_bytes")
    if peak is not None and (type(peak) is not int or not 0 <= peak < _INT64):
        raise _Bad(f"`peak_bytes` of {identifier!r} must be a whole number of bytes, not negative, or null")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for place, key in enumerate(keys) if key in keys[:place])
        raise _Bad(f"the key {twice!r} stands twice in one object")
    return record


def _refuse_constant(word: str) -> None:
    raise _Bad(f"{word} is not JSON; write null for a value that is not known")


def _finite(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise _Bad(f"the number {word[:40]} is too large")
    return value


def _canonical(content: str) -> str:
    return json.dumps(json.loads(content), sort_keys=True, separators=(",", ":"))


def _text(value: object) -> str | None:
    """A string that every database can hold (no NUL, no half of a surrogate pair), else None."""
    if not isinstance(value, str) or "\0" in value:
        return None
    return None if any("\ud800" <= c <= "\udfff" for c in value) else value


def _integer(value: object) -> int | None:
    return value if type(value) is int and -_INT64 <= value < _INT64 else None


_JSON_NAMES = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}
