"""Gradients of weights that a pipeline computes while it would wait (ZB-H1). What-if."""

from __future__ import annotations

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.memory.effects import Column
from llmlaunch.memory.job import Job
from llmlaunch.timing.effects import TimeEffect
from llmlaunch.timing.products import SplitColumns

__all__ = ["ZeroBubbleTime"]


class ZeroBubbleTime(TimeEffect):
    """With weight gradients apart, gradients of inputs are handed on before them, so a stage waits for those of the
    others no longer, and computes as many of its own meanwhile: ZB-H1's (p - 1)(F + B - W) in place of (p - 1)(F + B +
    W) (Qi et al. 2024, section 2.1). It has no chunks."""

    fills_and_drains = False

    def on(self, job: Job) -> bool:
        """Where it is asked for."""
        return job.techniques.zero_bubble

    def bubble(self, at: SplitColumns, bubble: FloatColumn, weight_gradients: Column) -> FloatColumn:
        """Twice the weight gradients of the other stages less."""
        return np.where(at.chunks > 1.0, bubble, np.maximum(bubble - 2.0 * weight_gradients(), 0.0))
