"""Rows that a search gathers are those that it found, however many come and however little room was made for them."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from llmlaunch.planner.points import GatheredRows, Rows, join_rows


def rows_of(start: int, count: int) -> Rows:
    """Return rows that differ from each other in every column."""
    columns = {f.name: np.arange(start, start + count) * (place + 1) for place, f in enumerate(fields(Rows))}
    return Rows(**columns)


@pytest.mark.parametrize("room", [0, 7, 100])
def test_gathered_rows_are_the_added_ones_in_order(room: int) -> None:
    blocks = [rows_of(0, 3), rows_of(3, 0), rows_of(3, 1), rows_of(4, 40), rows_of(44, 2)]
    gathered = GatheredRows(room)
    for block in blocks:
        gathered.add(block)
    assert len(gathered) == len(gathered.rows) == 46
    for name in (f.name for f in fields(Rows)):
        column = getattr(gathered.rows, name)
        assert column.tolist() == getattr(join_rows(blocks), name).tolist()
        assert column.itemsize == (8 if name.endswith(("_bytes", "_seconds")) else 4)
