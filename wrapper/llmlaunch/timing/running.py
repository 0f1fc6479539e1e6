"""Seconds of a step's forward and backward passes: everything but the parameter update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llmlaunch.cluster.profile import Cluster
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.job import Job
from llmlaunch.timing.constants import constant
from llmlaunch.timing.host import moves_activations, moving_seconds
from llmlaunch.timing.layers import KINDS, tokens_of
from llmlaunch.timing.network import neighbour
from llmlaunch.timing.stages import Pieces, Stages, pieces, stages

__all__ = ["Running", "running"]

FloatColumn = NDArray[np.float64]
IntColumn = NDArray[np.int64]

LOADER_WORKERS = 2.0  # Megatron's --num-workers by default, and what other loaders are usually given
KERNELS_OF_A_MICROBATCH = 40.0


@dataclass(frozen=True)
class Running:
    """Columns of seconds by term, and what can hide the transfers of data parallelism: seconds of the last backward and
    of the first forward pass on the busiest stage."""

    terms: Mapping[str, FloatColumn]
    microbatches: IntColumn
    hiding_forward: FloatColumn
    hiding_backward: FloatColumn

    @cached_property
    def total(self) -> FloatColumn:
        total: FloatColumn = sum(self.terms.values())  # type: ignore[assignment]
        return total


def running(job: Job, cluster: Cluster, layouts: LayoutColumns, microbatches: IntColumn | None = None) -> Running:
    """Every layout's passes. Nothing here depends on the ZeRO stage, the gradients' type or where the optimizer is.

    With stages that take S seconds for a micro-batch, the slowest of them S*, a step of m micro-batches takes
    `m S* + (sum S - S*) / v`: the pipeline fills and drains once, in 1/v of the time where each rank runs v chunks in
    turn (Narayanan et al. 2021, section 2.2). What the slowest stage does is shown by kind, the rest is the bubble.
    """
    m = layouts.num_microbatches(job.workload.global_batch_size) if microbatches is None else microbatches
    m = np.asarray(np.maximum(m, 1), dtype=np.int64)
    parts = pieces(job, cluster, layouts)
    found = stages(job, layouts, parts.seconds)
    kinds = _slowest_by_kind(job, layouts, parts, found)
    v = layouts.virtual_pipeline.astype(np.float64)
    terms: dict[str, FloatColumn] = {kind: m * column for kind, column in kinds.items()}
    terms["pipeline_bubble"] = np.maximum(found.all_seconds - found.slowest_seconds, 0.0) / v
    terms["pipeline_transfer"] = _transfer(job, cluster, layouts, m, found)
    terms["stragglers"] = _stragglers(layouts, m * found.slowest_seconds + terms["pipeline_bubble"])
    if job.facts.host.loader_mask:
        late = np.maximum(_loading(job, layouts) - found.slowest_seconds, 0.0)
        terms["data_loading"] = np.multiply(m, late)
    forward, backward = _compute(layouts, parts, found)
    if moves_activations(job, layouts):
        moving = moving_seconds(job, cluster, layouts, found.dense_layers, found.mixture_layers)
        terms["host_transfers"] = m * (np.maximum(moving - forward, 0.0) + np.maximum(moving - backward, 0.0))
    forward, backward = _beside(layouts, forward), _beside(layouts, backward)
    return Running(terms, m, forward, backward)


def _slowest_by_kind(job: Job, layouts: LayoutColumns, parts: Pieces, found: Stages) -> dict[str, FloatColumn]:
    """One micro-batch on the slowest stage, by kind: its layers and the ends it holds."""
    shape = job.shape
    kinds: dict[str, FloatColumn] = {}
    mixture_last = bool(shape.moe and shape.moe.layer_pattern[-1])
    for layer, count, ending in (
        (parts.dense, found.dense_layers, not mixture_last),
        (parts.mixture, found.mixture_layers, mixture_last),
    ):
        if layer is None:
            continue
        held = count + (shape.mtp_num_layers if ending else 0)
        for kind, column in layer.kinds.items():
            kinds[kind] = kinds[kind] + held * column if kind in kinds else held * column
    alone = layouts.pipeline == 1
    for kind, column in parts.ends.last.items():
        kinds[kind] = kinds[kind] + column
    for kind, column in parts.ends.first.items():
        kinds[kind] = kinds[kind] + np.where(alone, column, 0.0)
    kinds["kernel_launches"] = kinds["kernel_launches"] + constant("microbatch_seconds")
    return {kind: kinds[kind] for kind in KINDS if kind in kinds}


def _transfer(job: Job, cluster: Cluster, layouts: LayoutColumns, m: IntColumn, found: Stages) -> FloatColumn:
    """The hidden critical path of 1F1B: a micro-batch's round trip through all stages is waited for once for every p
    micro-batches (Pipette, Yim et al. 2024, section 4). Interleaved chunks send while the next one runs: only what a
    chunk does not hide is waited for, and the first round trip."""
    p, v = layouts.pipeline, layouts.virtual_pipeline
    if not np.any(p > 1):
        return np.zeros(len(layouts))
    message = job.facts.residual_bytes * job.shape.hidden_size * tokens_of(job, layouts)
    message = np.where(layouts.sequence_parallel > 0, message / layouts.tensor, message)
    hop = neighbour(cluster, layouts.tensor * layouts.context * layouts.data, p, message)
    trips = 2.0 * (p - 1.0) * hop
    plain = np.ceil(m / p) * trips
    if not np.any(v > 1):
        return plain
    hidden = trips + 2.0 * m * v * np.maximum(hop - found.slowest_seconds / (3.0 * v), 0.0)
    return np.where(v > 1, hidden, plain)


def _stragglers(layouts: LayoutColumns, passes: FloatColumn) -> FloatColumn:
    """Slack for the slowest device: devices of one kind differ in the clock they sustain, by a deviation that is a
    share of the passes' seconds, and all wait for the slowest, which of W devices lies sqrt(2 ln W) deviations below
    the mean (extreme values of normal variables)."""
    devices = layouts.tensor * layouts.pipeline * layouts.context * layouts.data
    slack: FloatColumn = constant("straggler_spread") * passes * np.sqrt(2.0 * np.log(devices))
    return slack


def _loading(job: Job, layouts: LayoutColumns) -> FloatColumn:
    """Seconds until the loader has the next micro-batch where every sample brings its own s x s attention mask: made on
    the host entry by entry, by a few workers."""
    entries = float(job.workload.sequence_length) ** 2 * layouts.micro_batch_size
    return np.asarray(constant("mask_entry_seconds") / LOADER_WORKERS * entries)


def _compute(layouts: LayoutColumns, parts: Pieces, found: Stages) -> tuple[FloatColumn, FloatColumn]:
    """Seconds one micro-batch computes in the layers of the slowest stage, (forward, backward)."""
    forward, backward = np.zeros(len(layouts)), np.zeros(len(layouts))
    for layer, count in ((parts.dense, found.dense_layers), (parts.mixture, found.mixture_layers)):
        if layer is not None:
            forward, backward = forward + count * layer.forward, backward + count * layer.backward
    return forward, backward


def _beside(layouts: LayoutColumns, seconds: FloatColumn) -> FloatColumn:
    """Of one micro-batch's `seconds`, what runs beside the transfers of data parallelism: all of it, and where a rank
    runs v chunks in turn, p micro-batches' of all chunks but one, because buckets belong to a chunk (megatron/core/
    distributed/param_and_grad_buffer.py, core 0.19)."""
    p, v = layouts.pipeline, layouts.virtual_pipeline
    return np.asarray(seconds * ((1.0 + (v - 1.0) * p) / v)) if np.any(v > 1) else seconds
