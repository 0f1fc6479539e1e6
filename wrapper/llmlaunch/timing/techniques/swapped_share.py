"""Activations of which a share of the tokens is swapped to host memory, and the rest computed again (MEMO). What-if."""

from __future__ import annotations

import numpy as np

from llmlaunch.layout import RECOMPUTE_FULL
from llmlaunch.memory.job import Job
from llmlaunch.timing.effects import TimeEffect
from llmlaunch.timing.layer_parts import LayerParts, Repeated
from llmlaunch.timing.products import DevicePace, SplitColumns

__all__ = ["SwapTime"]


class SwapTime(TimeEffect):
    """Tokens whose activations are not swapped are computed again: all of a layer but attention, whose output is
    swapped whole (MEMO, Zhao et al. 2025, section 4.1)."""

    order = 2  # beside what other techniques repeat

    def on(self, job: Job) -> bool:
        """Where any share is swapped."""
        return bool(job.techniques.swapped_share)

    def repeated(self, job: Job, at: SplitColumns, pace: DevicePace, parts: LayerParts) -> Repeated | None:
        """The layer without attention; full recompute does it anyway."""
        share = (1.0 - job.techniques.swapped_share) * (at.layouts.recompute != RECOMPUTE_FULL)
        seconds = np.asarray(share * (parts.computed.forward - parts.scores.forward))
        return Repeated(seconds, np.where(seconds > 0, parts.mlp.kernels[0], 0.0))
