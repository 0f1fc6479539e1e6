"""Activations of which a share of the tokens is swapped to host memory, and the rest computed again (MEMO). What-if."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.layers.attention import SoftmaxAttention
from llmlaunch.layers.columns import LayerColumns, Size
from llmlaunch.layout import RECOMPUTE_FULL, LayoutColumns
from llmlaunch.memory.activations import kept_by_layer, saved_share
from llmlaunch.memory.effects import Effect
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.layer_bytes import layers_of
from llmlaunch.memory.tokens import layer_input
from llmlaunch.techniques.what_ifs import Swap
from llmlaunch.timing.effects import LayerParts, Repeated, TimeEffect
from llmlaunch.timing.products import DevicePace, SplitColumns

ROUNDING_BUFFERS = 2.0


class SwapEffect(Effect):
    """Rounding buffers hold a layer each, and what is not swapped is recomputed into them (MEMO, Zhao et al. 2025,
    section 4): whatever the share, nothing else of a layer stays."""

    decides_moments = (Swap,)
    order = 2  # of what other techniques leave on the device

    def on(self, job: Job) -> bool:
        return bool(job.techniques.swapped_share)

    def on_device(
        self, job: Job, rows: RankColumns, saved_bytes: FloatColumn, of_groups: Sequence[FloatColumn]
    ) -> FloatColumn:
        """The rounding buffers."""
        largest = rows.most_of(of_groups) * saved_share(job, rows)
        return np.minimum(saved_bytes, ROUNDING_BUFFERS * largest)

    def moves(self, job: Job, layouts: LayoutColumns) -> bool:
        return True

    def without_moves(self, job: Job, layouts: LayoutColumns) -> tuple[Job, LayoutColumns]:
        """Nothing is swapped."""
        return replace(job, techniques=replace(job.techniques, swapped_share=0.0)), layouts

    def waiting(self, job: Job, rows: RankColumns, moved: FloatColumn) -> FloatColumn:
        """What is not computed again."""
        whole, swapped = rows.sum_of(kept_by_layer(job, rows)), rows.sum_of(swapped_by_layer(job, rows))
        return np.asarray(moved * np.where(whole > 0, swapped / np.where(whole > 0, whole, 1.0), 0.0))


def swapped_by_layer(job: Job, rows: RankColumns) -> list[FloatColumn]:
    """Return the bytes of one layer of each group and micro-batch that wait in host memory, of what it keeps: the
    layer's input and the attention's output whole, since no single token's can be recomputed, and of the rest the
    swapped share of the tokens (MEMO, Zhao et al. 2025, section 4.1)."""
    share, layers = job.techniques.swapped_share, layers_of(job, rows)
    e = job.facts.layer.activation_bytes

    def output(attention: SoftmaxAttention, c: LayerColumns) -> FloatColumn:
        return np.asarray(c.tokens * e * attention.output_width / c.tensor)

    outputs = layers.by_group(layers.of_blocks(SoftmaxAttention, output))
    wholes = zip(kept_by_layer(job, rows), outputs, strict=True)
    pairs = [(np.minimum(layer_input(job, rows) + output, kept), kept) for kept, output in wholes]
    return [whole + share * (kept - whole) for whole, kept in pairs]


class SwapTime(TimeEffect):
    """Tokens whose activations are not swapped are computed again: all of a layer but attention, whose output is
    swapped whole (MEMO, Zhao et al. 2025, section 4.1)."""

    order = 2  # beside what other techniques repeat, and what modules move

    def on(self, job: Job) -> bool:
        return bool(job.techniques.swapped_share)

    def repeated(self, job: Job, at: SplitColumns, pace: DevicePace, parts: LayerParts) -> Repeated | None:
        """The layer without attention; full recompute does it anyway."""
        share = (1.0 - job.techniques.swapped_share) * (at.layouts.recompute != RECOMPUTE_FULL)
        seconds = np.asarray(share * (parts.computed.forward - parts.scores.forward))
        return Repeated(seconds, np.where(seconds > 0, parts.mlp.kernels[0], 0.0))

    def moves(self, job: Job, layouts: LayoutColumns) -> bool:
        return True

    def moved(self, job: Job, rows: RankColumns, layers: Size, moved: Sequence[FloatColumn]) -> Sequence[FloatColumn]:
        """The swapped share."""
        return [some + swapped for some, swapped in zip(moved, swapped_by_layer(job, rows), strict=True)]
