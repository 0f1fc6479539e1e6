"""The sample of the corpus that the tests compare: some of every kind."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

Row = dict[str, Any]
EVERY = 80  # of a kind, from its first on


def sample(rows: Iterable[Row]) -> list[Row]:
    """Return every eightieth row of each kind, and of each kind at least the first."""
    kinds = groupby(rows, key=lambda row: row["kind"])
    return [row for _, of_kind in kinds for number, row in enumerate(of_kind) if number % EVERY == 0]
