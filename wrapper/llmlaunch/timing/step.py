"""Seconds of one training step by what they are spent on, for one layout or for a million.

A first model: matrix work at a fixed share of the peak, element-wise work at memory bandwidth, collectives as rings
over the slowest tier they cross, 1F1B with Pipette's hidden critical path (one more traversal for every p
micro-batches).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmlaunch.cluster.profile import Cluster
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, LayoutColumns
from llmlaunch.models.shape import ModelShape
from llmlaunch.workload import Workload

__all__ = ["StepTime", "layer_forward_seconds", "step_time"]

FloatColumn = NDArray[np.float64]

# Five figures no data sheet gives. Each was kept at a plausible round value that ranks the 56 timed layouts of an 8B
# model on 8 to 256 A100s best (tests/data/measurements/outcomes.jsonl, family fujii-grid-A100-40GB).
MATRIX_EFFICIENCY = 0.70  # share of dense peak that large matrix products reach
FABRIC_EFFICIENCY = 0.50  # share of the nominal fabric speed that collectives reach
LAYER_SECONDS = 6e-4  # launching a layer's kernels, forward and backward
RING_STEP_SECONDS = 4e-4  # one more ring step of context parallelism in a layer: small kernels, synchronisation
DATA_OVERLAP = 0.3  # share of one micro-batch's compute that hides the data-parallel transfers
# Bytes an element-wise pass moves for each byte it keeps: read the inputs, write the output, read it again.
TRAFFIC_PER_KEPT_BYTE = 3.0
OPTIMIZER_TRAFFIC_BYTES = 30.0  # per parameter of the shard: read and write master, moments, gradient, parameter


@dataclass(frozen=True)
class StepTime:
    """Columns of seconds by term; `total` is their sum."""

    terms: Mapping[str, FloatColumn]

    @property
    def total(self) -> FloatColumn:
        total: FloatColumn = np.sum(list(self.terms.values()), axis=0)
        return total


@dataclass(frozen=True)
class _Parts:
    """Per layer and micro-batch on one device, forward: seconds of matrix work, attention scores, element-wise."""

    matrix: FloatColumn
    scores: FloatColumn
    elementwise: FloatColumn
    head: FloatColumn
    layers: FloatColumn


def step_time(
    shape: ModelShape, workload: Workload, cluster: Cluster, layouts: LayoutColumns, microbatches: NDArray[np.int64]
) -> StepTime:
    """Seconds of one step for every layout. `microbatches` is the number per pipeline and step."""
    lay, parts = layouts, _parts(shape, workload, cluster, layouts)
    layers = parts.layers * (parts.matrix + parts.scores + parts.elementwise)
    # the head is on the last stage only; a pipeline runs at its slowest stage's pace
    forward_compute = layers + parts.head
    again = np.select(
        [lay.recompute == RECOMPUTE_FULL, lay.recompute == RECOMPUTE_SELECTIVE],
        [layers, parts.layers * parts.scores],
        0.0,
    )
    tensor = parts.layers * _tensor_seconds(shape, workload, cluster, lay)
    tensor = tensor * np.where(lay.recompute == RECOMPUTE_FULL, 4.0 / 3.0, 1.0)
    context = parts.layers * _context_exposed(shape, workload, cluster, lay, parts)
    expert = parts.layers * _expert_seconds(shape, workload, cluster, lay)
    launch = parts.layers * LAYER_SECONDS
    compute = 3.0 * forward_compute + again
    micro = compute + tensor + context + expert + launch  # one micro-batch, forward and backward, on one stage
    m, p, v = microbatches, lay.pipeline, lay.virtual_pipeline
    send = _pipeline_send(shape, workload, cluster, lay)
    terms = {
        "compute": m * 3.0 * forward_compute,
        "recompute": m * again,
        "kernel_launches": m * launch,
        "tensor_parallel": m * tensor,
        "context_parallel": m * context,
        "expert_parallel": m * expert,
        "pipeline_bubble": (p - 1) / v * micro,
        "pipeline_transfer": np.ceil(m / p) * 2.0 * (p - 1) * send * v,
        "data_parallel": _data_seconds(shape, cluster, lay, compute, m),
        "optimizer": _optimizer_seconds(shape, cluster, lay),
    }
    return StepTime(terms)


def layer_forward_seconds(
    shape: ModelShape, workload: Workload, cluster: Cluster, layouts: LayoutColumns
) -> FloatColumn:
    """Seconds one layer computes in the forward pass of one micro-batch, communication left out."""
    parts = _parts(shape, workload, cluster, layouts)
    seconds: FloatColumn = parts.matrix + parts.scores + parts.elementwise
    return seconds


def _tokens(workload: Workload, lay: LayoutColumns) -> FloatColumn:
    return workload.sequence_length * lay.micro_batch_size / lay.context


def layer_matrix_parameters(shape: ModelShape) -> float:
    """Weights a token passes through in one layer, averaged over dense and mixture layers."""
    h = shape.hidden_size
    attention = h * (2.0 * shape.query_width + 2.0 * shape.key_value_width)
    gates = 3.0 if shape.gated_mlp else 2.0
    if shape.moe is None:
        return attention + gates * h * shape.ffn_hidden_size
    moe = shape.moe
    share = sum(moe.layer_pattern) / len(moe.layer_pattern)
    mixture = gates * h * (moe.topk * moe.ffn_hidden_size + moe.shared_expert_ffn_hidden_size)
    return attention + share * mixture + (1.0 - share) * gates * h * shape.ffn_hidden_size


def model_flops_per_token(shape: ModelShape, sequence_length: int) -> float:
    """Forward and backward, causal attention, nothing recomputed: the numerator of MFU."""
    layer = 2.0 * layer_matrix_parameters(shape) + 2.0 * sequence_length * shape.query_width
    return 3.0 * (shape.num_layers * layer + 2.0 * shape.hidden_size * shape.vocab_size)


def _peak(cluster: Cluster, precision: str) -> float:
    table = cluster.accelerator.flops_per_second
    return table.get(precision) or table.get("bf16") or max(table.values())


def _parts(shape: ModelShape, workload: Workload, cluster: Cluster, lay: LayoutColumns) -> _Parts:
    n, t = _tokens(workload, lay), lay.tensor
    rate = MATRIX_EFFICIENCY * _peak(cluster, workload.precision)
    width = 4.0 if workload.precision == "fp32" else 2.0
    split = np.where(lay.sequence_parallel > 0, t, 1)
    kept = width * n * (4.0 * shape.hidden_size / split + (2.0 * shape.query_width + 3.0 * shape.ffn_hidden_size) / t)
    return _Parts(
        matrix=2.0 * n * layer_matrix_parameters(shape) / t / rate,
        scores=2.0 * n * workload.sequence_length * shape.query_width / t / rate,
        elementwise=TRAFFIC_PER_KEPT_BYTE * kept / cluster.accelerator.memory_bytes_per_second,
        head=2.0 * n * shape.hidden_size * shape.vocab_size / t / rate,
        layers=shape.num_layers / lay.pipeline,
    )


def _bandwidth(cluster: Cluster, span: NDArray[np.int64]) -> FloatColumn:
    """Bytes per second of the tier that a group spanning `span` consecutive devices crosses."""
    return np.where(
        span <= min(cluster.devices_per_node, cluster.nvlink_domain_devices),
        cluster.node_link.bytes_per_second,
        np.where(
            span <= cluster.nvlink_domain_devices,
            cluster.domain_link.bytes_per_second,
            FABRIC_EFFICIENCY * cluster.fabric_link.bytes_per_second,
        ),
    ).astype(np.float64)


def _latency(cluster: Cluster, span: NDArray[np.int64]) -> FloatColumn:
    near = span <= cluster.nvlink_domain_devices
    return np.where(near, cluster.node_link.latency_seconds, cluster.fabric_link.latency_seconds).astype(np.float64)


def _tensor_seconds(shape: ModelShape, workload: Workload, cluster: Cluster, lay: LayoutColumns) -> FloatColumn:
    """Four gathers or scatters of (tokens x hidden) forward and four backward per layer, and with sequence
    parallelism two more gathers backward (Korthikanti et al. 2022, section 4.2.2)."""
    t = lay.tensor
    width = 4.0 if workload.precision == "fp32" else 2.0
    message = _tokens(workload, lay) * shape.hidden_size * width * (t - 1) / t
    count = np.where(lay.sequence_parallel > 0, 10.0, 8.0)
    return np.where(t > 1, count * (message / _bandwidth(cluster, t) + _latency(cluster, t) * (t - 1)), 0.0)


def _context_exposed(
    shape: ModelShape, workload: Workload, cluster: Cluster, lay: LayoutColumns, parts: _Parts
) -> FloatColumn:
    """Ring exchange of keys and values, hidden behind attention where that takes longer, and what each step costs."""
    c, span = lay.context, lay.context * lay.tensor
    block = 2.0 * 2.0 * _tokens(workload, lay) * shape.key_value_width / lay.tensor
    ring = 3.0 * (c - 1) * (block / _bandwidth(cluster, span) + _latency(cluster, span))
    return np.where(c > 1, np.maximum(ring - 3.0 * parts.scores, 0.0) + (c - 1) * RING_STEP_SECONDS, 0.0)


def _expert_seconds(shape: ModelShape, workload: Workload, cluster: Cluster, lay: LayoutColumns) -> FloatColumn:
    """Dispatch and combine, forward and backward: four all-to-alls of topk copies of every token over the expert
    group, and as many gathers or scatters over the expert-tensor group."""
    if shape.moe is None:
        return np.zeros(len(lay))
    share = sum(shape.moe.layer_pattern) / len(shape.moe.layer_pattern)
    split = np.where(lay.sequence_parallel > 0, lay.tensor, 1)
    message = 4.0 * share * 2.0 * _tokens(workload, lay) / split * shape.moe.topk * shape.hidden_size
    span = lay.expert * lay.expert_tensor
    all_to_all = message * (lay.expert - 1) / lay.expert / _bandwidth(cluster, span)
    gather = message * (lay.expert_tensor - 1) / _bandwidth(cluster, lay.expert_tensor)
    return all_to_all + gather


def _pipeline_send(shape: ModelShape, workload: Workload, cluster: Cluster, lay: LayoutColumns) -> FloatColumn:
    """One boundary activation to the next stage. Stages are the outermost rank order, so they cross nodes first."""
    span = lay.tensor * lay.context * lay.data * lay.pipeline
    width = 4.0 if workload.precision == "fp32" else 2.0
    split = np.where(lay.sequence_parallel > 0, lay.tensor, 1)
    message = width * _tokens(workload, lay) * shape.hidden_size / split
    return np.where(lay.pipeline > 1, message / _bandwidth(cluster, span) + _latency(cluster, span), 0.0)


def _stage_parameters(shape: ModelShape, lay: LayoutColumns) -> FloatColumn:
    """Parameters of a device, experts split over expert parallelism; good enough for transfer times."""
    gates = 3.0 if shape.gated_mlp else 2.0
    attention = shape.hidden_size * (2.0 * shape.query_width + 2.0 * shape.key_value_width)
    dense = attention + gates * shape.hidden_size * shape.ffn_hidden_size
    if shape.moe is None:
        layer = dense / lay.tensor
    else:
        expert = gates * shape.hidden_size * shape.moe.ffn_hidden_size * shape.moe.num_experts
        layer = attention / lay.tensor + expert / (lay.expert * lay.expert_tensor)
    return shape.num_layers * layer / lay.pipeline + shape.hidden_size * shape.vocab_size / lay.tensor


def _data_seconds(
    shape: ModelShape, cluster: Cluster, lay: LayoutColumns, compute: FloatColumn, microbatches: NDArray[np.int64]
) -> FloatColumn:
    """Gradients reduced and parameters gathered once a step; ZeRO 3 gathers parameters twice and scatters gradients
    for every micro-batch. `compute` is one micro-batch's, part of which hides the transfers."""
    group = lay.data * lay.context
    ring = (group - 1) / group / _bandwidth(cluster, group * lay.tensor)
    parameters = _stage_parameters(shape, lay)
    once = np.maximum((4.0 + 2.0) * parameters * ring - DATA_OVERLAP * compute, 0.0)
    every = microbatches * np.maximum(3.0 * 2.0 * parameters * ring - DATA_OVERLAP * compute, 0.0)
    return np.where(group > 1, np.where(lay.zero_stage >= 3, every, once), 0.0)


def _optimizer_seconds(shape: ModelShape, cluster: Cluster, lay: LayoutColumns) -> FloatColumn:
    shard = np.where(lay.zero_stage > 0, lay.data * lay.context, 1)
    return OPTIMIZER_TRAFFIC_BYTES * _stage_parameters(shape, lay) / shard / cluster.accelerator.memory_bytes_per_second
