"""Numbers and literals in text that a person or another program wrote: logs, scripts, argument dumps, answers of SLURM.

Each function returns the value, or says that it is unreadable (None for a number, UNREADABLE for a literal), and none
raises. `str.isdigit` also holds for superscripts, which `int` refuses; `int` refuses more than 4,300 digits; `float`
makes an infinity of 1e999, which no integer can hold; `ast.literal_eval` raises TypeError for {[]: 1} and returns
complex numbers and bytes, which neither JSON nor a recipe can hold. JSON text is read by `files.parse_json`, and by
`documents.json_strict` where the person is told what is wrong with it.
"""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

MOST_WHOLE = 2**63 - 1
"""The largest whole number that a database, JSON readers of other languages and NumPy hold."""

MOST_DEPTH = 32
"""Limit for lists and mappings within each other; what is read must also be writable again."""

LONGEST_LITERAL = 4096  # characters
_WHOLE = re.compile(r"\d{1,19}", re.ASCII)
_NUMBER = re.compile(r"[-+]?(?:\d{1,64}\.?\d{0,64}|\.\d{1,64})(?:[eE][-+]?\d{1,4})?", re.ASCII)
_LONG_NUMBER = re.compile(r"[-+]?\d{19,}", re.ASCII)
_SIGNS = re.compile(r"(?:[-+~]\s*){3}")


class _Unreadable:
    """The type of UNREADABLE."""

    def __repr__(self) -> str:
        return "UNREADABLE"


UNREADABLE = _Unreadable()


def fits_64_bits(value: int) -> bool:
    """Return whether a whole number fits 64 bits with a sign."""
    return -MOST_WHOLE - 1 <= value <= MOST_WHOLE


def whole_number_in(text: str | bytes | None) -> int | None:
    """Return the whole number that `text` is, ASCII digits alone; None for any other text and above MOST_WHOLE."""
    text = _as_text(text)
    if _WHOLE.fullmatch(text) is None:
        return None
    value = int(text)
    return value if value <= MOST_WHOLE else None


def is_whole_number(text: str | bytes) -> bool:
    """Return whether `whole_number_in` reads this text, and so `int` does."""
    return whole_number_in(text) is not None


def number_in(text: str | bytes | None) -> float | None:
    """Return the finite number that `text` is, in decimal notation; None for any other text."""
    text = _as_text(text)
    if _NUMBER.fullmatch(text) is None:
        return None
    value = float(text)
    return value if math.isfinite(value) else None


def byte_size_in(text: str | bytes | None, unit_bytes: int) -> int | None:
    """Return the bytes of an amount such as 1.25 in units of `unit_bytes`; None where it is no such amount."""
    amount = number_in(text)
    if amount is None or not 0 <= amount * unit_bytes <= MOST_WHOLE:
        return None
    return int(amount * unit_bytes)


def _as_text(text: str | bytes | None) -> str:
    if text is None:
        return ""
    return text.decode("ascii", "replace") if isinstance(text, bytes) else text


def literal_in(text: str) -> Any:
    """Return the Python value that `text` prints: None, true or false, a number, a text, or a list, tuple, set or
    mapping of them.

    Text that prints no value is returned as it is: a log prints names and paths without quotes. UNREADABLE stands for
    complex numbers and bytes, for a key that cannot be one, and for what exceeds 64 bits, LONGEST_LITERAL or
    MOST_DEPTH.
    """
    plain = text.strip()
    if _LONG_NUMBER.fullmatch(plain):
        return _bounded(int(plain)) if len(plain) <= 20 else UNREADABLE
    if len(plain) > LONGEST_LITERAL:
        return UNREADABLE if plain[0] in "[({" else text
    if _bracket_depth(plain) > MOST_DEPTH:
        return UNREADABLE if plain[0] in "[({" else text
    if _SIGNS.search(plain):  # nobody prints them, and Python's parser recurses at each
        return text
    import ast  # not needed on a node

    try:
        with warnings.catch_warnings():  # an odd escape in somebody else's text is no news for the person
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
    """Return a value that `literal_eval` made, or UNREADABLE where a part of it is."""
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
    """Return whether more than `most` lists and mappings of a JSON or YAML value are within each other. The value is
    walked level by level, not by recursion."""
    depth, level = 0, [value]
    while level and depth <= most:
        parents = [item for item in level if isinstance(item, (dict, list))]
        level = [item for parent in parents for item in (parent.values() if isinstance(parent, dict) else parent)]
        depth += bool(parents)
    return depth > most
