"""The safe layouts that nothing beats in both step time and head-room."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmlaunch.planner.search import Found

__all__ = ["pareto"]


def pareto(found: Found) -> NDArray[np.int64]:
    """Rows of `found`, fastest first: each next one is slower and leaves more free. Of layouts equal in both the first
    stands for all."""
    safe = np.flatnonzero(found.safe)
    filled = found.device_bytes[safe]
    order = np.lexsort((safe, filled, np.round(found.step_seconds[safe], 12)))
    filled = filled[order]
    least_before = np.concatenate([[np.inf], np.minimum.accumulate(filled)])[: len(filled)]
    front: NDArray[np.int64] = safe[order[filled < least_before]]
    return front
