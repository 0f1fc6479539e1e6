"""Seconds of one decoder layer on one device for one micro-batch, by what they are spent on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmlaunch.cluster.profile import Cluster
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, LayoutColumns
from llmlaunch.memory.job import Job
from llmlaunch.timing.constants import constant
from llmlaunch.timing.exchange import Passes, context_ring, expert_exchange, tensor_passes
from llmlaunch.timing.products import Pace, Work, attention_linears, attention_scores, linear_work, mlp_linears

__all__ = ["KINDS", "Layer", "dense_layer", "mixture_layer", "tokens_of"]

FloatColumn = NDArray[np.float64]

KINDS = (
    "matrix_products",
    "attention",
    "element_wise",
    "kernel_launches",
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "recompute",
)
TILE_ROWS = 128.0  # rows of a tile of a grouped product: every expert's tokens fill whole ones
# Kernels of a layer forward and backward, counted in a profile of Transformer Engine's layers: norms, projections,
# rotary positions, attention, activation, collectives. A mixture adds routing and permutation, and its grouped products
# are one kernel for each matrix of each of the device's experts.
DENSE_KERNELS, MIXTURE_KERNELS, EXPERT_KERNELS = (20.0, 40.0), (40.0, 70.0), (2.0, 4.0)
DEFAULT_MODULES = ("core_attn",)


@dataclass(frozen=True)
class Layer:
    """Columns of seconds of one layer and micro-batch, by kind, and the compute (no communication) that can hide
    something forward and backward."""

    kinds: Mapping[str, FloatColumn]
    forward: FloatColumn
    backward: FloatColumn

    @property
    def seconds(self) -> FloatColumn:
        total: FloatColumn = sum(self.kinds.values())  # type: ignore[assignment]
        return total


@dataclass(frozen=True)
class _Parts:
    """What a layer consists of before anything is recomputed."""

    attention_linears: Work
    scores: Work
    mlp_linears: Work
    shared_linears: Work | None
    element_wise: Work
    activation: FloatColumn  # of the element-wise forward pass, the MLP's activation function
    norms: FloatColumn  # and the norms
    tensor: Passes
    context: Work
    expert: Work | None
    kernels: tuple[float | FloatColumn, float | FloatColumn]


def tokens_of(job: Job, lay: LayoutColumns) -> FloatColumn:
    """Tokens of one micro-batch on one context-parallel rank."""
    tokens: FloatColumn = job.workload.sequence_length * lay.micro_batch_size / lay.context
    return tokens


def dense_layer(job: Job, cluster: Cluster, lay: LayoutColumns, pace: Pace) -> Layer:
    """A layer with one MLP."""
    n, t = tokens_of(job, lay), lay.tensor.astype(np.float64)
    mlp = linear_work(job, pace, mlp_linears(job.shape, float(job.shape.ffn_hidden_size)), n, t)
    return _layer(job, lay, _parts(job, cluster, lay, pace, mlp, float(job.shape.ffn_hidden_size) / t * n, None))


def mixture_layer(job: Job, cluster: Cluster, lay: LayoutColumns, pace: Pace) -> Layer:
    """A layer with a mixture of experts: every device's experts get, of all tokens of its expert group, as many copies
    as its own tokens are routed to, the busiest device `expert_imbalance` times that."""
    moe = job.shape.moe
    assert moe is not None
    n, t = tokens_of(job, lay), lay.tensor.astype(np.float64)
    copies = job.facts.expert_imbalance * moe.topk * n / t * lay.expert_tensor
    if moe.capacity_factor is not None:
        copies = np.minimum(copies, moe.capacity_factor * moe.topk * n / t * lay.expert_tensor)
    local = moe.num_experts / lay.expert
    rows = local * TILE_ROWS * np.ceil(copies / (TILE_ROWS * local))
    width, etp = float(moe.ffn_hidden_size), lay.expert_tensor.astype(np.float64)
    experts = linear_work(job, pace, mlp_linears(job.shape, width), rows, etp, weights=local)
    shared = float(moe.shared_expert_ffn_hidden_size)
    beside = linear_work(job, pace, mlp_linears(job.shape, shared), n, t) if shared else None
    activated = width / etp * copies + shared / t * n
    return _layer(job, lay, _parts(job, cluster, lay, pace, experts, activated, beside, copies))


def _parts(
    job: Job,
    cluster: Cluster,
    lay: LayoutColumns,
    pace: Pace,
    mlp: Work,
    activated: FloatColumn,
    shared: Work | None,
    copies: FloatColumn | None = None,
) -> _Parts:
    """`activated` elements leave the MLP's activation function; `copies` of tokens are routed."""
    n, t = tokens_of(job, lay), lay.tensor.astype(np.float64)
    attention = linear_work(job, pace, attention_linears(job.shape), n, t)
    scores = attention_scores(job, pace, n, t, lay.context.astype(np.float64))
    element, activation, norms = _element_wise(job, lay, pace, n, t, activated, copies)
    return _Parts(
        attention,
        scores,
        mlp,
        shared,
        element,
        activation,
        norms,
        tensor_passes(job, cluster, lay, n, mixture=copies is not None),
        context_ring(job, cluster, lay, pace, n, scores),
        None if copies is None else expert_exchange(job, cluster, lay, n),
        DENSE_KERNELS if copies is None else _mixture_kernels(job, lay),
    )


def _mixture_kernels(job: Job, lay: LayoutColumns) -> tuple[FloatColumn, FloatColumn]:
    moe = job.shape.moe
    assert moe is not None
    local = moe.num_experts / lay.expert
    return MIXTURE_KERNELS[0] + EXPERT_KERNELS[0] * local, MIXTURE_KERNELS[1] + EXPERT_KERNELS[1] * local


def _element_wise(
    job: Job,
    lay: LayoutColumns,
    pace: Pace,
    n: FloatColumn,
    t: FloatColumn,
    activated: FloatColumn,
    copies: FloatColumn | None,
) -> tuple[Work, FloatColumn, FloatColumn]:
    """Bytes read and written through device memory. Forward: two norms and two residual additions (10 hidden elements
    a token), rotary positions of queries and keys (read, written), a gated activation (2 read, 1 written). Backward:
    as many for norms and residuals, the same for positions, 3 read and 2 written for the activation. A mixture permutes
    its tokens there and back. Quantized linears read what they are given and write it narrow, in two orientations."""
    shape, e = job.shape, job.facts.activation_bytes
    stream = np.where(lay.sequence_parallel > 0, t, 1.0) if np.any(lay.sequence_parallel == 0) else t
    hidden = e / pace.element_wise * shape.hidden_size * n
    norms = 4.0 * hidden / stream
    residual = 6.0 * hidden / stream
    rotary = (2.0 * e / pace.element_wise * (shape.query_width + shape.key_value_width)) * n / t
    gates = 2.0 if shape.gated_mlp else 1.0
    activation = (gates + 1.0) * e / pace.element_wise * activated
    forward = norms + residual + rotary + activation
    backward = norms + residual + rotary + (2.0 * gates + 1.0) / (gates + 1.0) * activation
    if copies is not None:
        permuted = 4.0 * e / pace.element_wise * shape.hidden_size * copies
        forward, backward = forward + permuted, backward + permuted
    if job.facts.quantized is not None:
        cast = (e + 2.0 * job.facts.quantized.input_bytes) / pace.element_wise
        widths = (2.0 * shape.hidden_size + shape.query_width / t) * n + (
            activated if copies is None else 2.0 * activated
        )
        outputs = (2.0 * shape.hidden_size + (shape.query_width + 2.0 * shape.key_value_width) / t) * n
        forward = forward + cast * widths
        backward = backward + cast * (outputs + gates * activated)
    return Work(forward, backward), activation, norms


def _layer(job: Job, lay: LayoutColumns, parts: _Parts) -> Layer:
    linears = parts.attention_linears + parts.mlp_linears
    if parts.shared_linears is not None:
        linears = linears + parts.shared_linears
    again, passes, kernels_again = _recomputed(job, lay, parts, linears)
    device = linears.forward + parts.scores.forward + parts.element_wise.forward
    backward = linears.backward + parts.scores.backward + parts.element_wise.backward
    kernels = parts.kernels[0] + parts.kernels[1] + kernels_again
    launches = constant("kernel_seconds") * kernels
    host = constant("kernel_host_seconds") * kernels  # one thread launches them all: it is never faster than this
    waits = np.maximum(host - launches - device - backward - again, 0.0)
    kinds = {
        "matrix_products": linears.both,
        "attention": parts.scores.both,
        "element_wise": parts.element_wise.both,
        "kernel_launches": launches + waits,
        "tensor_parallel": parts.tensor.exposed(again_passes=passes, beside=linears.backward),
        "context_parallel": parts.context.both,
        "recompute": again,
    }
    if parts.expert is not None:
        kinds["expert_parallel"] = parts.expert.both
    return Layer(kinds, device, backward + again)


def _recomputed(
    job: Job, lay: LayoutColumns, parts: _Parts, linears: Work
) -> tuple[FloatColumn, FloatColumn, FloatColumn]:
    """Seconds of forward work done again before the backward pass, the tensor-parallel passes done again with it (of
    the four forward), and the kernels launched again.

    Full recompute does all of a layer again, by the method "block" of some layers of each model chunk alone. Selective
    recompute does what its modules name (megatron/core/transformer/transformer_layer.py, core 0.19).
    """
    zero = np.zeros(len(lay))
    if not np.any(lay.recompute):
        return zero, zero, zero
    whole = linears.forward + parts.scores.forward + parts.element_wise.forward + parts.context.forward
    if parts.expert is not None:
        whole = whole + parts.expert.forward
    share = full_share(job, lay)
    some, some_passes, some_kernels = _of_modules(job, parts, zero)
    selective = lay.recompute == RECOMPUTE_SELECTIVE
    again = np.where(selective, some, share * whole)
    passes = np.where(selective, some_passes, 4.0 * share)
    kernels = np.where(selective, some_kernels, share * parts.kernels[0])
    kept = lay.recompute == RECOMPUTE_NONE
    return np.where(kept, 0.0, again), np.where(kept, 0.0, passes), np.where(kept, 0.0, kernels)


def full_share(job: Job, lay: LayoutColumns) -> FloatColumn:
    """Of all layers, those that full recompute does again."""
    full = np.where(lay.recompute == RECOMPUTE_FULL, 1.0, 0.0)
    if job.techniques.recompute_method != "block" or not np.any(lay.recompute_layers):
        return full
    chunk = job.shape.num_layers / (lay.pipeline * lay.virtual_pipeline)
    some = np.where(lay.recompute_layers > 0, np.minimum(lay.recompute_layers / chunk, 1.0), 1.0)
    return np.multiply(full, some)


def _of_modules(job: Job, parts: _Parts, zero: FloatColumn) -> tuple[FloatColumn, float, float | FloatColumn]:
    modules = job.techniques.recompute_modules or DEFAULT_MODULES
    mixture = parts.expert is not None
    seconds, passes = zero, 0.0
    kernels: float | FloatColumn = 0.0
    if "core_attn" in modules:
        seconds, kernels = seconds + parts.scores.forward + parts.context.forward, kernels + 2.0
    if "mla_up_proj" in modules:
        seconds, kernels = seconds + 0.5 * parts.attention_linears.forward, kernels + 4.0
    if "layernorm" in modules:
        seconds, kernels = seconds + parts.norms, kernels + 2.0
    if "mlp" in modules and not mixture:
        seconds = seconds + parts.mlp_linears.forward + parts.activation
        passes, kernels = passes + 2.0, kernels + 0.4 * parts.kernels[0]
    if "moe" in modules and parts.expert is not None:
        seconds = seconds + parts.mlp_linears.forward + parts.activation + parts.expert.forward
        kernels = kernels + 0.6 * parts.kernels[0]
    if "moe_act" in modules and mixture:
        seconds, kernels = seconds + parts.activation, kernels + 1.0
    if ("shared_experts" in modules or "moe" in modules) and parts.shared_linears is not None:
        seconds = seconds + parts.shared_linears.forward
    return seconds, passes, kernels
