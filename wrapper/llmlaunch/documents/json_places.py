"""Where a value stands in a JSON text. Python's own reader tells places of syntax errors alone; this walks the text
again, only when a message needs it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

__all__ = ["place_of"]

_BLANK = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


def place_of(text: str, key: tuple[str | int, ...]) -> int:
    """The line, from 1, of the value at `key` in valid JSON, or of the nearest enclosing one that exists."""
    at = _skip(text, 0)
    for wanted in key:
        inner = dict(_members(text, at)).get(wanted)
        if inner is None:
            break
        at = inner
    return text.count("\n", 0, at) + 1


def _members(text: str, at: int) -> Iterator[tuple[str | int, int]]:
    """(key or index, position) of each member of the object or list that begins at `at`."""
    if text[at] not in "{[":
        return
    named, index = text[at] == "{", 0
    at = _skip(text, at + 1)
    while text[at] not in "}]":
        key: str | int = index
        if named:
            key, at = _DECODER.raw_decode(text, at)
            at = _skip(text, _skip(text, at) + 1)
        yield key, at
        at = _skip(text, _DECODER.raw_decode(text, at)[1])
        if text[at] == ",":
            at = _skip(text, at + 1)
        index += 1


def _skip(text: str, at: int) -> int:
    blank = _BLANK.match(text, at)
    return at if blank is None else blank.end()
