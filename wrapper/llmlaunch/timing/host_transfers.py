"""Seconds in which activations travel to host memory and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from llmlaunch.cluster.profile import Cluster
from llmlaunch.columns import FloatColumn
from llmlaunch.layers.columns import Size
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.activations import kept_by_layer
from llmlaunch.memory.job import Job, without_layers
from llmlaunch.timing.effects import TimeEffect, time_effects
from llmlaunch.timing.network import host_link_bytes_per_second

__all__ = ["moves_activations", "moving_seconds", "moving_seconds_of_layers"]


def moves_activations(job: Job, layouts: LayoutColumns) -> bool:
    """Whether any layout's activations wait in host memory."""
    return any(moves(job, layouts) for moves in time_effects(job, TimeEffect.moves))


def moving_seconds(job: Job, cluster: Cluster, layouts: LayoutColumns, layers: Sequence[Size]) -> FloatColumn:
    """Return the seconds that one micro-batch's activations of a stage with so many layers of each kind travel to host
    memory, and again back."""
    each = moving_seconds_of_layers(job, cluster, layouts, reduce(np.add, layers))
    return reduce(np.add, (count * seconds for count, seconds in zip(layers, each, strict=True)))


def moving_seconds_of_layers(
    job: Job, cluster: Cluster, layouts: LayoutColumns, layers: Size
) -> tuple[FloatColumn, ...]:
    """Return the seconds that one micro-batch's activations of a layer of each kind travel to host memory, on a stage
    with so many layers."""
    rows, rate = without_layers(job, layouts), host_link_bytes_per_second(cluster)
    moved: Sequence[FloatColumn] = [np.zeros_like(kept) for kept in kept_by_layer(job, rows)]
    for effect in time_effects(job, TimeEffect.moved):
        moved = effect(job, rows, layers, moved)
    return tuple(each / rate for each in moved)
