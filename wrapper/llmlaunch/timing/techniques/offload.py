"""Activations that wait in host memory until their backward pass: those of named modules, the layer inputs that full
recompute keeps, or whole layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.layers.columns import Size
from llmlaunch.layout import RECOMPUTE_FULL, LayoutColumns
from llmlaunch.memory.activations import kept_by_layer
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.techniques.offload import offloads_modules, without_offloaded_modules
from llmlaunch.memory.tokens import layer_input
from llmlaunch.timing.effects import TimeEffect

__all__ = ["CheckpointOffloadTime", "LayerOffloadTime", "ModuleOffloadTime"]


class ModuleOffloadTime(TimeEffect):
    """Layouts may name the modules; the job names them otherwise."""

    def moves(self, job: Job, layouts: LayoutColumns) -> bool:
        """Where any module is named."""
        return offloads_modules(job.techniques, layouts)

    def moved(self, job: Job, rows: RankColumns, layers: Size, moved: Sequence[FloatColumn]) -> Sequence[FloatColumn]:
        """What the modules save."""
        if not offloads_modules(job.techniques, rows.layouts):
            return moved
        here, on_device = without_offloaded_modules(job, rows.layouts)
        whole, left = kept_by_layer(here, rows.with_layouts(on_device)), kept_by_layer(job, rows)
        return [a - b + c for a, b, c in zip(whole, left, moved, strict=True)]


class CheckpointOffloadTime(TimeEffect):
    """The layer inputs of full recompute."""

    order = 3  # in place of what leaves otherwise

    def on(self, job: Job) -> bool:
        """Where they leave."""
        return job.techniques.offload_checkpoints

    def moves(self, job: Job, layouts: LayoutColumns) -> bool:
        """Always."""
        return True

    def moved(self, job: Job, rows: RankColumns, layers: Size, moved: Sequence[FloatColumn]) -> Sequence[FloatColumn]:
        """The inputs alone."""
        inputs = layer_input(job, rows)
        return [np.where(rows.layouts.recompute == RECOMPUTE_FULL, inputs, each) for each in moved]


class LayerOffloadTime(TimeEffect):
    """The first layers of each rank, whole. Layouts say how many."""

    order = 5  # of what leaves of other layers

    def moves(self, job: Job, layouts: LayoutColumns) -> bool:
        """Where any layer leaves."""
        return bool(np.any(layouts.offload_layers))

    def moved(self, job: Job, rows: RankColumns, layers: Size, moved: Sequence[FloatColumn]) -> Sequence[FloatColumn]:
        """All that these layers keep."""
        if not np.any(rows.layouts.offload_layers):
            return moved
        share = np.minimum(rows.layouts.offload_layers / np.maximum(layers, 1.0), 1.0)
        return [(1.0 - share) * some + share * one for some, one in zip(moved, kept_by_layer(job, rows), strict=True)]
