"""Python literals in text printed by another program: logs, argument dumps, command lines.

`ast.literal_eval` raises TypeError for {[]: 1} and returns complex numbers and bytes, which neither JSON nor a recipe
can hold. The functions here never raise; unreadable text becomes UNREADABLE.
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from typing import Any

from llmlaunch.rundir.foreign_values import fits_64_bits

MOST_DEPTH = 32
"""Limit for lists and mappings within each other; what is read must also be writable again."""

LONGEST_LITERAL = 4096  # characters
_LONG_NUMBER = re.compile(r"[-+]?\d{19,}", re.ASCII)
_SIGNS = re.compile(r"(?:[-+~]\s*){3}")


class _Unreadable:
    """The type of UNREADABLE."""

    def __repr__(self) -> str:
        return "UNREADABLE"


UNREADABLE = _Unreadable()


def literal_in(text: str) -> Any:
    """Return the Python value that `text` prints: None, true or false, a number, a text, or a list, tuple, set or
    mapping of them.

    Text that prints no value is returned unchanged, because logs print names and paths without quotes. UNREADABLE is
    returned for complex numbers and bytes, for a key that cannot be one, and for anything beyond 64 bits,
    LONGEST_LITERAL or MOST_DEPTH.
    """
    plain = text.strip()
    if _LONG_NUMBER.fullmatch(plain):
        return _bounded(int(plain)) if len(plain) <= 20 else UNREADABLE
    if len(plain) > LONGEST_LITERAL:
        return UNREADABLE if plain[0] in "[({" else text
    if _bracket_depth(plain) > MOST_DEPTH:
        return UNREADABLE if plain[0] in "[({" else text
    if _SIGNS.search(plain):  # no program prints so many, and Python's parser recurses at each
        return text
    try:
        with warnings.catch_warnings():  # an odd escape in another program's text does not concern the user
            warnings.simplefilter("ignore")
            return _bounded(ast.literal_eval(plain))
    except (ValueError, SyntaxError):
        return text
    except (TypeError, RecursionError, MemoryError):
        return UNREADABLE


def _bracket_depth(text: str) -> int:
    depth = most = 0
    for character in text:
        if character in "[({":
            depth += 1
            most = max(most, depth)
        elif character in "])}":
            depth -= 1
    return most


def _bounded(value: Any) -> Any:
    """Return a value made by `literal_eval`, or UNREADABLE if any part of it is."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return value if fits_64_bits(value) else UNREADABLE
    if isinstance(value, float):
        return value if math.isfinite(value) else UNREADABLE
    if isinstance(value, (list, tuple, set, frozenset)):
        return value if all(_bounded(item) is not UNREADABLE for item in value) else UNREADABLE
    if isinstance(value, dict):
        return value if all(_bounded(part) is not UNREADABLE for pair in value.items() for part in pair) else UNREADABLE
    return UNREADABLE


def is_deeper_than(value: Any, most: int = MOST_DEPTH) -> bool:
    """Return whether a JSON or YAML value nests more than `most` lists and mappings. The value is walked level by
    level, without recursion."""
    depth, level = 0, [value]
    while level and depth <= most:
        parents = [item for item in level if isinstance(item, (dict, list))]
        level = [item for parent in parents for item in (parent.values() if isinstance(parent, dict) else parent)]
        depth += bool(parents)
    return depth > most
