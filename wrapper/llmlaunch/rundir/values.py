"""Values as files may hold them: one that cannot be what it should be counts as None, or as nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass

__all__ = ["byte_count", "count_above_zero", "number", "objects_in", "text_or_none", "time_or_none", "whole_number"]

_INT64 = 2**63


def byte_count(value: object) -> int | None:
    """Return a whole number that is not negative and fits a database, else None."""
    return value if type(value) is int and 0 <= value < _INT64 else None


def whole_number(value: object) -> int | None:
    return value if type(value) is int else None


def count_above_zero(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def number(value: object) -> float | None:
    """Return a finite number that is not negative, else None."""
    return float(value) if type(value) in (int, float) and 0 <= value < 1e300 else None  # type: ignore[operator, arg-type]


def time_or_none(value: object) -> float | None:
    """Return unix seconds, else None."""
    return value if isinstance(value, (int, float)) and 0 < value < 1e11 else None


def text_or_none(value: object) -> str | None:
    """Return a text that is not empty, else None."""
    return value if isinstance(value, str) and value else None


def objects_in(values: object) -> list[dict[str, Any]]:
    """Return the JSON objects of a list; none where it is no list."""
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []
