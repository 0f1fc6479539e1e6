"""What depends on a layout's recompute: worked out only for the granularities that are there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.memory.job import RankColumns

__all__ = ["by_recompute"]

Column = Callable[[], FloatColumn]


def by_recompute(rows: RankColumns, none: Column, selective: Column, full: Column) -> FloatColumn:
    """Each row's value of the column of its granularity, in the order of the RECOMPUTE_ codes."""
    ways, recompute = (none, selective, full), rows.layouts.recompute
    chosen: FloatColumn | None = None
    for code in np.flatnonzero(np.bincount(recompute, minlength=len(ways))):
        column = ways[code]()
        chosen = column if chosen is None else np.where(recompute == code, column, chosen)
    return np.zeros(0) if chosen is None else chosen
