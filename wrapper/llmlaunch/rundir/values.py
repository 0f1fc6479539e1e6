"""Numbers as files may hold them: what is none that can be, is None."""

from __future__ import annotations

__all__ = ["byte_count", "number", "time_or_none"]

_INT64 = 2**63


def byte_count(value: object) -> int | None:
    """A whole number of bytes that a database holds, else None."""
    return value if type(value) is int and 0 <= value < _INT64 else None


def number(value: object) -> float | None:
    """A finite number that is not negative, else None."""
    return float(value) if type(value) in (int, float) and 0 <= value < 1e300 else None  # type: ignore[operator, arg-type]


def time_or_none(value: object) -> float | None:
    """Unix seconds, else None."""
    return value if isinstance(value, (int, float)) and 0 < value < 1e11 else None
