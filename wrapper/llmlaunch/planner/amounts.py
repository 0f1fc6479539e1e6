"""Amounts solved exactly for each split: recomputed and offloaded layers, the fewest that are safe.

Every layer more that is recomputed or offloaded needs no more memory and takes no less time, so the fewest that are
safe are the fastest, and bisection finds them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmlaunch.columns import BoolColumn, IntColumn
from llmlaunch.layout import RECOMPUTE_NONE, LayoutColumns
from llmlaunch.models.shape import ModelShape

__all__ = ["fewest", "most_of", "without"]


def most_of(shape: ModelShape, layouts: LayoutColumns, name: str) -> IntColumn:
    """All layers of a model chunk can be recomputed; one of a rank's stays on the device
    (megatron/core/transformer/transformer_config.py cpu_offloading_num_layers, core 0.19)."""
    even = shape.num_layers // (layouts.pipeline * layouts.virtual_pipeline)
    largest = np.array([max(split, default=0) for split in layouts.partitions])[layouts.partition]
    layers = np.where(layouts.uneven, largest, even)
    most: IntColumn = np.maximum(layers if name == "recompute_layers" else layers - 1, 1)
    return most


def without(layouts: LayoutColumns, name: str) -> LayoutColumns:
    """The same layouts with none of an amount."""
    if name == "recompute_layers":
        return layouts.with_words(0, RECOMPUTE_NONE, 0, layouts.offload_layers)
    return layouts.with_amount(name, np.zeros(len(layouts), dtype=np.int64))


def fewest(safe: Callable[[IntColumn, IntColumn], BoolColumn], most: IntColumn, enough: BoolColumn) -> IntColumn:
    """The smallest amount in 1 .. `most` of each row for which `safe(rows, amounts)` holds, `most` where that is not
    `enough`. What is safe stays safe with more."""
    low: IntColumn = np.ones_like(most)
    high: IntColumn = most.copy()
    rows = np.flatnonzero(enough)
    while len(rows := rows[low[rows] < high[rows]]):
        middle = (low[rows] + high[rows]) // 2
        found = safe(rows, middle)
        high[rows[found]] = middle[found]
        low[rows[~found]] = middle[~found] + 1
    return high
