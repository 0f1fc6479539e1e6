"""A measurement record as text: read it strictly, keep it as it was written, compare by content.

The store keeps each record's own line, so an export is the same JSON to the last digit and key. Two texts are equal
when they parse to the same values and types: the order of keys, white space and the spelling of a number (1e3,
1000.0) do not count, 12 and 12.0 differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["BadRecord", "Line", "columns", "dump", "dump_all", "line_of", "same_content"]

_INT64 = 2**63
_NOTHING = object()
_OWN = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True)
class Line:
    """One record of a file: where it stood, its text, and what it says."""

    number: int
    content: str
    record: dict[str, Any]

    @property
    def id(self) -> str:
        return str(self.record["id"])


def dump(record: Mapping[str, Any]) -> str:
    """A record of our own as one line."""
    return _OWN.encode(record)


def dump_all(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Records of our own, each with an id of its own, as one line each.

    Those of one run share most of their values, the very same objects: they are put into words once.
    """
    texts = []
    before: Mapping[str, Any] = {}
    shared: dict[str, Any] = {}
    words = ""
    for record in records:
        own = {key: value for key, value in record.items() if shared.get(key, _NOTHING) is not value}
        if shared and len(own) + len(shared) == len(record):
            texts.append(f"{_OWN.encode(own)[:-1]},{words}")
        else:
            texts.append(_OWN.encode(record))
            shared = {key: value for key, value in record.items() if before.get(key, _NOTHING) is value}
            words = _OWN.encode(shared)[1:]
        before = record
    return texts


def same_content(one: str, other: str) -> bool:
    return one == other or _canonical(one) == _canonical(other)


def columns(record: Mapping[str, Any]) -> dict[str, str | int | float | None]:
    """What the store can be asked for, where the record has a plain value of it."""
    row: dict[str, str | int | float | None] = {
        key: _text(record.get(key)) for key in ("family", "backend", "gpu", "peak_kind", "run_id", "attempt")
    }
    row["pipeline_rank"] = _integer(record.get("pipeline_rank"))
    row["peak_bytes"] = _integer(record.get("peak_bytes"))
    started = record.get("started_at")
    row["started_at"] = started if isinstance(started, float) else _integer(started)
    return row


class BadRecord(Exception):
    """What is wrong with one line, without its place."""


def line_of(number: int, raw: bytes) -> Line:
    """The record in one line. Raises BadRecord."""
    try:
        content = raw.decode().strip()
    except UnicodeDecodeError as error:
        raise BadRecord(f"not UTF-8 text (byte {error.start + 1})") from None
    try:
        record = json.loads(content, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise BadRecord(f"not JSON: {error.msg}, column {error.colno}") from None
    except RecursionError:
        raise BadRecord("not a measurement record: nested too deeply") from None
    except ValueError as error:  # an integer of more digits than Python reads
        raise BadRecord(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise BadRecord(f"a measurement record is a JSON object, not {_JSON_NAMES[type(record)]}")
    _check(record)
    return Line(number, content, record)


def _check(record: dict[str, Any]) -> None:
    if "id" not in record:
        raise BadRecord("the record has no `id`")
    identifier = record["id"]
    if not _text(identifier):
        raise BadRecord("`id` must be a non-empty text of ordinary characters")
    peak = record.get("peak_bytes")
    if peak is not None and (type(peak) is not int or not 0 <= peak < _INT64):
        raise BadRecord(f"`peak_bytes` of {identifier!r} must be a whole number of bytes, not negative, or null")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for place, key in enumerate(keys) if key in keys[:place])
        raise BadRecord(f"the key {twice!r} stands twice in one object")
    return record


def _refuse_constant(word: str) -> None:
    raise BadRecord(f"{word} is not JSON; write null for a value that is not known")


def _finite(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise BadRecord(f"the number {word[:40]} is too large")
    return value


def _canonical(content: str) -> str:
    return json.dumps(json.loads(content), sort_keys=True, separators=(",", ":"))


def _text(value: object) -> str | None:
    """A string that every database can hold (no NUL, no half of a surrogate pair), else None."""
    if not isinstance(value, str) or "\0" in value:
        return None
    if value.isascii():
        return value
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
