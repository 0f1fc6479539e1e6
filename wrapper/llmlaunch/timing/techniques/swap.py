"""Activations of which a share of the tokens is swapped to host memory, and the rest computed again (MEMO). What-if."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.layers.columns import Size
from llmlaunch.layout import RECOMPUTE_FULL, LayoutColumns
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.techniques.swap import swapped_by_layer
from llmlaunch.timing.effects import TimeEffect
from llmlaunch.timing.layer_parts import LayerParts, Repeated
from llmlaunch.timing.products import DevicePace, SplitColumns

__all__ = ["SwapTime"]


class SwapTime(TimeEffect):
    """Tokens whose activations are not swapped are computed again: all of a layer but attention, whose output is
    swapped whole (MEMO, Zhao et al. 2025, section 4.1)."""

    order = 2  # beside what other techniques repeat, and what modules move

    def on(self, job: Job) -> bool:
        """Where any share is swapped."""
        return bool(job.techniques.swapped_share)

    def repeated(self, job: Job, at: SplitColumns, pace: DevicePace, parts: LayerParts) -> Repeated | None:
        """The layer without attention; full recompute does it anyway."""
        share = (1.0 - job.techniques.swapped_share) * (at.layouts.recompute != RECOMPUTE_FULL)
        seconds = np.asarray(share * (parts.computed.forward - parts.scores.forward))
        return Repeated(seconds, np.where(seconds > 0, parts.mlp.kernels[0], 0.0))

    def moves(self, job: Job, layouts: LayoutColumns) -> bool:
        """Always."""
        return True

    def moved(self, job: Job, rows: RankColumns, layers: Size, moved: Sequence[FloatColumn]) -> Sequence[FloatColumn]:
        """The swapped share."""
        return [some + swapped for some, swapped in zip(moved, swapped_by_layer(job, rows), strict=True)]
