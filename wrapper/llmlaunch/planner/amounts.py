"""Amounts solved exactly for each split: recomputed and offloaded layers, the fewest that are safe.

Every layer more that is recomputed or offloaded needs no more memory and takes no less time, so the fewest that are
safe are the fastest, and bisection finds them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmlaunch.layout import RECOMPUTE_NONE, LayoutColumns
from llmlaunch.memory.estimator import worst_ranks
from llmlaunch.memory.host import worst_hosts
from llmlaunch.memory.job import Job
from llmlaunch.planner.host import node_of

if TYPE_CHECKING:
    from llmlaunch.planner.setting import Setting

__all__ = ["fewest", "smallest_safe"]

IntColumn = NDArray[np.int64]
BoolColumn = NDArray[np.bool_]


def smallest_safe(setting: Setting, job: Job, layouts: LayoutColumns, name: str) -> tuple[IntColumn, IntColumn]:
    """(rows that need some of the amount, how much of it): the fewest layers that are safe, all where none are enough.
    Rows that are safe without any are left out: they are the same layouts without these words."""
    nothing = layouts.with_amount(name, np.zeros(len(layouts), dtype=np.int64))
    if name == "recompute_layers":
        nothing = replace(nothing, recompute=np.full(len(layouts), RECOMPUTE_NONE))
    needed = np.flatnonzero(~is_safe(setting, job, nothing))
    chosen, most = layouts.take(needed), most_of(job, layouts.take(needed), name)

    def safe(rows: IntColumn, amount: IntColumn) -> BoolColumn:
        return is_safe(setting, job, chosen.take(rows).with_amount(name, amount))

    return needed, fewest(safe, most)


def most_of(job: Job, layouts: LayoutColumns, name: str) -> IntColumn:
    """All layers of a model chunk can be recomputed; one of a rank's stays on the device
    (megatron/core/transformer/transformer_config.py cpu_offloading_num_layers, core 0.19)."""
    layers = job.shape.num_layers // (layouts.pipeline * layouts.virtual_pipeline)
    most: IntColumn = np.maximum(layers if name == "recompute_layers" else layers - 1, 1)
    return most


def is_safe(setting: Setting, job: Job, layouts: LayoutColumns) -> BoolColumn:
    """Fits devices and nodes."""
    fits = worst_ranks(job, layouts).device_bytes <= setting.limit.limit_bytes
    host = worst_hosts(job, layouts, node_of(setting.recipe)) <= setting.host_limit.limit_bytes
    safe: BoolColumn = fits & host
    return safe


def fewest(safe: Callable[[IntColumn, IntColumn], BoolColumn], most: IntColumn) -> IntColumn:
    """The smallest amount in 1 .. `most` of each row for which `safe(rows, amounts)` holds, `most` where none does.
    What is safe stays safe with more."""
    low: IntColumn = np.ones_like(most)
    high: IntColumn = most.copy()
    rows = np.flatnonzero(safe(np.arange(len(most)), most)) if len(most) else np.arange(0)
    while len(rows := rows[low[rows] < high[rows]]):
        middle = (low[rows] + high[rows]) // 2
        enough = safe(rows, middle)
        high[rows[enough]] = middle[enough]
        low[rows[~enough]] = middle[~enough] + 1
    return high
