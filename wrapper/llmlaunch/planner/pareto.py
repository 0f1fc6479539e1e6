"""The safe layouts that nothing beats in both step time and head-room."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmlaunch.planner.search import Found

__all__ = ["pareto"]


def pareto(found: Found) -> NDArray[np.int64]:
    """Places of the ranking (`Found.order`), fastest first: each next one is slower and leaves more free. Of layouts
    equal in both the first of the ranking stands for all."""
    ranked = found.order[found.safe[found.order]]
    seconds = np.round(found.step_seconds[ranked], 12)
    filled = found.device_bytes[ranked]
    places = np.arange(len(ranked))
    by_time = np.lexsort((places, filled, seconds))
    least_before = np.concatenate([[np.inf], np.minimum.accumulate(filled[by_time])[:-1]]) if len(ranked) else filled
    front: NDArray[np.int64] = by_time[filled[by_time] < least_before]
    return front
