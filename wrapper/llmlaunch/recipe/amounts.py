"""Large counts as people write them: 15T, 300B, 1.5M."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

__all__ = ["TOKENS", "token_count"]

TOKENS = re.compile(r"^[0-9]{1,18}(\.[0-9]{1,18})?[KMBT]$")
_TIMES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def token_count(value: Any) -> Any:
    """The whole number that a text such as 1.5T stands for, exactly; anything else as it is.

    Raises:
        ValueError: a fraction of a token, or a text that is no such amount.
    """
    if not isinstance(value, str):
        return value
    if TOKENS.fullmatch(value) is None:
        raise ValueError(f"must be a whole number, or one with K, M, B or T such as 1.5T, not {value[:40]!a}")
    amount = Decimal(value[:-1]) * _TIMES[value[-1]]
    if amount != int(amount):
        raise ValueError(f"{value} is no whole number of tokens")
    return int(amount)
