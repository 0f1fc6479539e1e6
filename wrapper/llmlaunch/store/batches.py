"""Values in groups that one statement can take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

__all__ = ["batches"]

T = TypeVar("T")
PARAMETERS = 500  # SQLite before 3.32 takes 999 in one statement


def batches(values: Iterable[T], most: int = PARAMETERS) -> Iterator[list[T]]:
    rest = iter(values)
    while some := list(islice(rest, most)):
        yield some
