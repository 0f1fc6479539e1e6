"""A guard against mistakes of the estimator: an estimate that breaks a law of memory is never safe.

Two laws. No term is negative. No rank's torch memory is below what it must hold when the optimizer steps, however well
that is shared. The bound reads none of the formula: exact parameter counts, the sizes of the groups, and what the
backend says that it keeps of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

import numpy as np
from numpy.typing import NDArray

from llmlaunch.columns import FloatColumn
from llmlaunch.layers.parameters import count_parameters
from llmlaunch.memory.effects import Effect, effects_of, optimizer_on_device, shards_on_device, trains_all
from llmlaunch.memory.job import Job, RankColumns, mixture_layers
from llmlaunch.models.shape import ModelShape
from llmlaunch.units import GIB

# What an estimate that breaks a law counts as where layouts are compared: more than any device or node has, whole as a
# float and as an integer of 64 bits.
IMPOSSIBLE_BYTES = 2.0**60
ROUNDING_BYTES = 1024.0  # terms are rounded to whole bytes one by one


def negative_rows(columns: Iterable[FloatColumn]) -> NDArray[np.bool_] | None:
    """Return the rows in which any column is negative; None where there are none, which costs one minimum a column."""
    negative = [column < 0.0 for column in columns if column.size and column.min() < 0.0]
    return np.logical_or.reduce(negative) if negative else None


def unless_negative(total: FloatColumn, columns: Iterable[FloatColumn]) -> FloatColumn:
    """Return the total of the columns, and IMPOSSIBLE_BYTES in rows in which any of them is negative."""
    negative = negative_rows(columns)
    return total if negative is None else np.where(negative, IMPOSSIBLE_BYTES, total)


def broken_law(terms: Mapping[str, int], torch_bytes: float, least: float) -> str | None:
    """Return as a clause the law that the terms of one rank, or of a node's host memory, break; None where all hold.
    `torch_bytes` is what torch is predicted to hold, and `least` what it holds at least."""
    for name, size in terms.items():
        if size < 0:
            return f"{name.replace('_', ' ')} would take {size / GIB:.2f} GiB"
    if torch_bytes < least:
        return (
            f"all of it would take {torch_bytes / GIB:.2f} GiB, where parameters, gradients and optimizer states alone "
            f"take {least / GIB:.2f} GiB, shared by as many devices as may share them"
        )
    return None


def least_torch_bytes(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes that the rank of each row holds at least when the optimizer steps: its share of the parameters,
    and of gradients and optimizer states where all parameters are trained, less what is on the host. The bytes are
    corrected by measured runs."""
    facts, layouts = job.facts, rows.layouts
    sharding = facts.states.full_sharding
    dense, expert = _parameters(job, rows)
    ranks = layouts.tensor * layouts.context * layouts.data
    share = np.minimum(layouts.expert * layouts.expert_tensor / ranks, 1.0)
    whole, shards = dense + expert, dense / (layouts.data * layouts.context) + expert * share
    stage, shard_from = layouts.zero_stage, 3 if sharding is None else sharding.first_stage
    least: FloatColumn = _parameter_bytes(job) * np.where(stage >= shard_from, shards, whole)
    if trains_all(job):
        least = least + facts.states.gradient_bytes * np.where(stage >= 2, shards, whole)
        least = least + _state_bytes(job) * np.where(stage >= 1, shards, whole)
    return np.maximum(least * job.correction.torch_factor - ROUNDING_BYTES, 0.0)


def _parameter_bytes(job: Job) -> float:
    if not shards_on_device(job):
        return 0.0
    facts, quantized = job.facts, job.facts.layer.quantized
    if quantized is not None and quantized.replaces_parameters:
        return min(quantized.weight_copy_bytes, 1.0)
    least = float(facts.states.parameter_bytes)
    for effect in effects_of(job, Effect.least_parameter_bytes):
        least = effect(job, least)
    return least


def _state_bytes(job: Job) -> float:
    states = job.facts.states
    sharded, unsharded = states.optimizer_bytes, states.optimizer_bytes_unsharded
    least = (sharded if unsharded is None else min(sharded, unsharded)) - states.matrix_states_spared_bytes
    return optimizer_on_device(job) * max(least, 0.0)


def _parameters(job: Job, rows: RankColumns) -> tuple[FloatColumn, FloatColumn]:
    """Return (dense, expert) parameters of a row's rank on a device, split by as many devices as may split them."""
    dense_layer, mixture_layer, experts, embedding, head = _counts(job.shape)
    mixtures = mixture_layers(job, rows)
    layers = (rows.layers - mixtures) * dense_layer + mixtures * mixture_layer
    dense = (layers + rows.first * embedding + rows.last * head) / rows.tensor
    return dense, mixtures * experts / (rows.layouts.expert * rows.layouts.expert_tensor)


@cache
def _counts(shape: ModelShape) -> tuple[int, int, int, int, int]:
    """Return the parameters of the least dense layer, of the least mixture layer without experts, of its experts, of
    embedding and head."""
    count = count_parameters(shape)
    dense = min((layer.total for layer in count.layers if not layer.experts), default=0)
    mixture = min((layer.total - layer.experts for layer in count.layers if layer.experts), default=0)
    return dense, mixture, max(layer.experts for layer in count.layers), count.embedding, count.head
