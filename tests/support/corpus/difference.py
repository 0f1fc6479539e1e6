"""Where two answers differ, and how. Equal are whole numbers and texts that are the same, and floats at most four units
in the last place apart; keys have an order, because what is written has it."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator
from typing import Any

MOST_ULPS = 4
NUMBERS = ("run.json", "placement.json", "plan.json")
"""Files of JSON that hold predicted seconds, by the end of their names: their floats are compared as floats."""


def differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """Yield a sentence, or the lines that changed, for each difference of `after` from `before`; `place` is where both
    are in the answer."""
    if isinstance(before, dict) and isinstance(after, dict):
        yield from _of_mappings(before, after, place)
    elif isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            yield f"{place}: {len(before)} entries, now {len(after)}"
            yield from _of_texts(_lines(before), _lines(after), place)
        else:
            for index, (old, new) in enumerate(zip(before, after, strict=True)):
                yield from differences(old, new, f"{place}[{index}]")
    elif isinstance(before, str) and isinstance(after, str):
        if before != after and not (place.endswith(NUMBERS) and _equal_as_json(before, after)):
            yield from _of_texts(before, after, place)
    elif not _equal(before, after):
        yield f"{place}: {before!r}, now {after!r}"


def _of_mappings(before: dict[str, Any], after: dict[str, Any], place: str) -> Iterator[str]:
    for key in before.keys() | after.keys():
        if key not in after:
            yield f"{place}.{key}: was {_short(before[key])}, now absent"
        elif key not in before:
            yield f"{place}.{key}: was absent, now {_short(after[key])}"
    shared = [key for key in before if key in after]
    if shared != [key for key in after if key in before]:
        yield f"{place}: the order of keys was {shared}, now {[key for key in after if key in before]}"
    for key in shared:
        yield from differences(before[key], after[key], f"{place}.{key}" if place else key)


def _equal(before: Any, after: Any) -> bool:
    if type(before) is not type(after):
        return False
    if isinstance(before, float) and before != after:
        return abs(before - after) <= MOST_ULPS * math.ulp(max(abs(before), abs(after)))
    return bool(before == after)


def _equal_as_json(before: str, after: str) -> bool:
    try:
        return next(differences(json.loads(before), json.loads(after)), None) is None
    except ValueError:
        return False


def _of_texts(before: str, after: str, place: str) -> Iterator[str]:
    if "\n" not in before and "\n" not in after:
        yield f"{place}: {before!r}, now {after!r}"
        return
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"{place} before", f"{place} now", "", "", n=1
    )
    yield "\n".join(line.rstrip("\n") for line in lines) or f"{place}: line ends differ"


def _lines(values: list[Any]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
