"""Measurement records as a table: a column for each value, named by its keys with dots between (`model.num_layers`).

Every record comes back equal by content. An empty cell is a key that the record has not; `null`, `true`, `false` and
numbers stand as JSON has them, lists and empty objects as JSON; a text stands as it is unless it would then be read as
one of these, and else in JSON's quotes. No cell and no heading begins with a character that spreadsheets take for the
beginning of a formula, but for negative numbers.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from llmlaunch.rundir.messages import counted

__all__ = ["BadCell", "path_of", "record_of", "rows", "text_of_row"]

_WORDS = {"null": None, "true": True, "false": False, "TRUE": True, "FALSE": False}  # spreadsheets write capitals
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", re.ASCII)
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*", re.ASCII)
_SEGMENT = re.compile(r'"(?:[^"\\]|\\.)*"|[^."]+')
# Where lines are cut at semicolons, as spreadsheets in much of the world do, quotes in the midst of a line hold nothing
# together. The wide forms count, too.
_FORMULA = re.compile("(?:^|;)[\\s\"']*[=+\\-@\uff1d\uff0b\uff0d\uff20]")

Path = tuple[str, ...]


class BadCell(ValueError):
    """What is wrong with a heading or a cell, without its place."""


def rows(records: Iterable[Mapping[str, Any]]) -> Iterator[list[str]]:
    """The headings, in the order in which the records name them, then a row for each record."""
    flat = [dict(_flat(record, ())) for record in records]
    columns = list(dict.fromkeys(path for record in flat for path in record))
    yield [_heading(path) for path in columns]
    for record in flat:
        yield [record.get(path, "") for path in columns]


def text_of_row(row: Sequence[str]) -> str:
    """One line, without its end."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(row)
    return line.getvalue()


def path_of(heading: str) -> Path:
    """The keys in a heading. Raises BadCell."""
    segments = _SEGMENT.findall(heading)
    if ".".join(segments) != heading or not segments:
        raise BadCell(f"the heading {heading[:60]!r} is none: keys with dots between, odd ones in JSON's quotes")
    try:
        return tuple(json.loads(segment) if segment.startswith('"') else segment for segment in segments)
    except ValueError:
        raise BadCell(f"the heading {heading[:60]!r} holds a key that is no JSON text") from None


def record_of(columns: Sequence[Path], row: Sequence[str]) -> dict[str, Any]:
    """The record in a row. Raises BadCell."""
    if len(row) > len(columns) and any(row[len(columns) :]):
        raise BadCell(f"has {counted(len(row), 'cell')}, but the heading line has {len(columns)}")
    record: dict[str, Any] = {}
    for path, cell in zip(columns, row, strict=False):
        if cell == "":
            continue
        inner = record
        for number, key in enumerate(path[:-1], start=1):
            inner = inner.setdefault(key, _Made())
            if not isinstance(inner, _Made):
                raise BadCell(f"has a value for {_heading(path[:number])} and one for {_heading(path)}")
        if path[-1] in inner:
            raise BadCell(f"has a value for {_heading(path)} and one for a key in it")
        inner[path[-1]] = value_of(cell)
    return record


def value_of(cell: str) -> Any:
    """The value in a cell that is not empty. Raises BadCell."""
    if cell in _WORDS:
        return _WORDS[cell]
    if _NUMBER.fullmatch(cell) or cell[0] in '[{"':
        try:
            return json.loads(cell)
        except (ValueError, RecursionError):
            raise BadCell(f"the cell {cell[:60]!r} is no JSON") from None
    return cell


class _Made(dict[str, Any]):
    """An object made for keys with dots, not read from a cell."""


def _flat(record: Mapping[str, Any], above: Path) -> Iterator[tuple[Path, str]]:
    for key, value in record.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, (*above, key))
        else:
            yield (*above, key), _cell(value)


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value if _stands_as_it_is(value) else _quoted(value)
    if isinstance(value, (list, dict)):
        return _quoted(value)
    return json.dumps(value)


def _stands_as_it_is(text: str) -> bool:
    if not text.isprintable() or text != text.strip() or _FORMULA.search(text):
        return False
    return text != "" and text not in _WORDS and text[0] not in '[{"' and not _NUMBER.fullmatch(text)


def _quoted(value: Any) -> str:
    """JSON without control characters, and without semicolons, which are only in its texts."""
    return json.dumps(value, separators=(",", ":")).replace(";", "\\u003b")


def _heading(path: Path) -> str:
    return ".".join(key if _PLAIN_KEY.fullmatch(key) else _quoted(key) for key in path)
