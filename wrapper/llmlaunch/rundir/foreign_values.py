"""Numbers in text written by a person or another program: logs, scripts, argument dumps, answers of SLURM.

Each function returns the value, or None if it is unreadable; none raises. `str.isdigit` is true for superscripts, which
`int` refuses; `int` refuses more than 4,300 digits; `float` turns 1e999 into infinity, which no integer can hold. Other
values are read by `documents.literals`, and JSON text by `files.parse_json`, or by `documents.json_strict` if the user
is to be told what is wrong.
"""

from __future__ import annotations

import math
import re

MOST_WHOLE = 2**63 - 1
"""The largest whole number that a database, JSON readers of other languages and NumPy hold."""

_WHOLE = re.compile(r"\d{1,19}", re.ASCII)
_NUMBER = re.compile(r"[-+]?(?:\d{1,64}\.?\d{0,64}|\.\d{1,64})(?:[eE][-+]?\d{1,4})?", re.ASCII)


def fits_64_bits(value: int) -> bool:
    """Return whether a whole number fits in 64 bits with a sign."""
    return -MOST_WHOLE - 1 <= value <= MOST_WHOLE


def whole_number_in(text: str | bytes | None) -> int | None:
    """Return the whole number in `text`, which must be ASCII digits only, or None for any other text and above
    MOST_WHOLE."""
    text = _as_text(text)
    if _WHOLE.fullmatch(text) is None:
        return None
    value = int(text)
    return value if value <= MOST_WHOLE else None


def is_whole_number(text: str | bytes) -> bool:
    """Return whether `whole_number_in` can read this text, and therefore `int` can."""
    return whole_number_in(text) is not None


def number_in(text: str | bytes | None) -> float | None:
    """Return the finite decimal number in `text`, or None for any other text."""
    text = _as_text(text)
    if _NUMBER.fullmatch(text) is None:
        return None
    value = float(text)
    return value if math.isfinite(value) else None


def byte_size_in(text: str | bytes | None, unit_bytes: int) -> int | None:
    """Return the number of bytes for an amount such as 1.25 in units of `unit_bytes`, or None if the text is not such
    an amount."""
    amount = number_in(text)
    if amount is None or not 0 <= amount * unit_bytes <= MOST_WHOLE:
        return None
    return int(amount * unit_bytes)


def _as_text(text: str | bytes | None) -> str:
    if text is None:
        return ""
    return text.decode("ascii", "replace") if isinstance(text, bytes) else text
