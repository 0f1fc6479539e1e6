"""Seconds of pipeline stages: what one layer costs, what the ends add, and which stage is the slowest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from llmlaunch.cluster.profile import Cluster
from llmlaunch.columns import FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.job import Job, all_ranks
from llmlaunch.timing.exchange import tensor_pass
from llmlaunch.timing.layers import LayerSeconds, dense_layer, mixture_layer
from llmlaunch.timing.products import DevicePace, Linear, SplitColumns, pace, rates, split_of

__all__ = [
    "Ends",
    "Pieces",
    "StageSeconds",
    "Stages",
    "last_seconds",
    "pieces",
    "stage_seconds",
    "stages",
    "stages_in_balance",
]


# Per logit of a compiled loss. Kernel by kernel the eager one reads and writes 52 bytes (to fp32, maximum, difference,
# exponential, sum, quotient, gradient, to bf16), the compiled one 32 (megatron/core/tensor_parallel/cross_entropy.py,
# fusions/fused_cross_entropy.py, core 0.19); of the first 24 are counted, because parts stay in the cache.
NATIVE_LOSS_BYTES = 24.0 * 32.0 / 52.0


@frozen
class StageSeconds:
    """Columns of seconds, forward and backward of one micro-batch: of one dense and of one mixture layer, and what the
    first stage (embedding) and the last (norm, head, loss) do beside their layers. Zero for what a model has not."""

    dense_layer: FloatColumn
    mixture_layer: FloatColumn
    first: FloatColumn
    last: FloatColumn


@frozen
class Ends:
    """Seconds of the first and the last stage beside their layers, by kind."""

    first: Mapping[str, FloatColumn]
    last: Mapping[str, FloatColumn]


@frozen
class Pieces:
    """The parts of stages; None where a model has no such layer."""

    dense: LayerSeconds | None
    mixture: LayerSeconds | None
    ends: Ends
    seconds: StageSeconds


@frozen
class Stages:
    """Seconds of one micro-batch through all stages of each layout, seconds of the slowest stage, its layers, and 1
    where it is the first or the last."""

    all_seconds: FloatColumn
    slowest_seconds: FloatColumn
    dense_layers: FloatColumn
    mixture_layers: FloatColumn
    first: FloatColumn
    last: FloatColumn


def stage_seconds(job: Job, cluster: Cluster, layouts: LayoutColumns) -> StageSeconds:
    """Return the seconds of one micro-batch in each kind of layer and at both ends, for every layout."""
    return pieces(job, cluster, split_of(job, layouts)).seconds


def pieces(job: Job, cluster: Cluster, at: SplitColumns) -> Pieces:
    """Return the parts of stages, with their seconds by kind."""
    pattern = job.shape.moe.layer_pattern if job.shape.moe else (0,)
    speed = pace(job, cluster)
    one_pass = tensor_pass(job, cluster, at)
    dense = dense_layer(job, cluster, at, speed, one_pass) if 0 in pattern else None
    mixture = mixture_layer(job, cluster, at, speed, one_pass) if 1 in pattern else None
    ends = _ends(job, at, speed, one_pass)
    zero = np.zeros(len(at))
    seconds = StageSeconds(
        zero if dense is None else dense.seconds,
        zero if mixture is None else mixture.seconds,
        _sum(ends.first),
        _sum(ends.last),
    )
    return Pieces(dense, mixture, ends, seconds)


def _sum(kinds: Mapping[str, FloatColumn]) -> FloatColumn:
    total: FloatColumn = sum(kinds.values())  # type: ignore[assignment]
    return total


def _ends(job: Job, at: SplitColumns, pace: DevicePace, one_pass: FloatColumn) -> Ends:
    """Return the seconds of both ends. Embedding: rows looked up and their gradients added, a scatter over tensor
    parallelism and its reverse. Head: the input gathered, the product, the logits read and written by the loss about as
    often as they are kept alive, the gradient scattered beside the weight's. Gathered logits travel once too, a
    vocabulary wide. A tiled loss repeats the forward product (Luo et al. 2024, MsT)."""
    shape, facts = job.shape, job.facts
    hidden = facts.activation_bytes * shape.hidden_size / pace.element_wise
    exchange = 2.0 * one_pass
    looked_up = 0.0 * one_pass if facts.embedding_whole else exchange
    first = {"element_wise": (4.0 * hidden) * at.tokens, "tensor_parallel": looked_up}
    vocabulary = float(shape.vocab_size)
    product = rates(job, pace, [Linear(float(shape.hidden_size), vocabulary, "outputs")], wide=True)
    head = product.work(at.tokens, at.share, at.per_tensor)
    logit_traffic = (1.0 if facts.fused_loss is not None else 3.0) * (facts.logit_bytes + facts.logit_gradient_bytes)
    if job.techniques.loss == "native":
        logit_traffic = NATIVE_LOSS_BYTES
    over = at.tokens if facts.logits_gathered else at.share
    loss = (logit_traffic / pace.element_wise * vocabulary + 4.0 * hidden) * over
    if facts.logits_gathered:
        exchange = exchange + (vocabulary / shape.hidden_size) * one_pass
    last = {"matrix_products": head.both, "element_wise": loss, "tensor_parallel": exchange}
    if job.techniques.loss == "tiled":
        last["recompute"] = head.forward
    if shape.mtp_num_layers:
        last = {name: (1.0 + shape.mtp_num_layers) * column for name, column in last.items()}
    return Ends(first, last)


def stages(job: Job, layouts: LayoutColumns, seconds: StageSeconds) -> Stages:
    """Return the layers of the slowest stage and the seconds of all. The head makes the last of even stages the
    slowest."""
    shape = job.shape
    pattern: Sequence[int] = shape.moe.layer_pattern if shape.moe else (0,) * shape.num_layers
    last = last_seconds(job, seconds)
    dense, mixture = float(len(pattern) - sum(pattern)), float(sum(pattern))
    total = dense * seconds.dense_layer + mixture * seconds.mixture_layer + seconds.first + last
    if (dense and mixture) or np.any(layouts.uneven):
        return _rank_by_rank(job, layouts, replace(seconds, last=last), total)
    p = layouts.pipeline
    each = shape.num_layers / p
    layer = seconds.dense_layer if dense else seconds.mixture_layer
    slowest = each * layer + np.where(p > 1, np.maximum(seconds.first, last), seconds.first + last)
    none, ends = np.zeros(len(layouts)), np.asarray(last >= seconds.first, dtype=np.float64)
    first = np.where(p > 1, 1.0 - ends, 1.0)
    return Stages(total, slowest, each if dense else none, none if dense else each, first, np.where(p > 1, ends, 1.0))


def stages_in_balance(job: Job, layouts: LayoutColumns, seconds: StageSeconds) -> Stages:
    """Return stages that all take the same time, as if layers could be cut anywhere."""
    shape = job.shape
    mixture = float(sum(shape.moe.layer_pattern)) if shape.moe else 0.0
    dense = shape.num_layers - mixture
    last = last_seconds(job, seconds)
    total = dense * seconds.dense_layer + mixture * seconds.mixture_layer + seconds.first + last
    share = 1.0 / layouts.pipeline
    return Stages(total, share * total, share * dense, share * mixture, share, share)


def last_seconds(job: Job, seconds: StageSeconds) -> FloatColumn:
    """Return the seconds of the last stage beside its decoder layers: its end, and the layers of multi-token
    prediction."""
    moe = job.shape.moe
    layer = seconds.mixture_layer if moe is not None and moe.layer_pattern[-1] else seconds.dense_layer
    return seconds.last + job.shape.mtp_num_layers * layer


def _rank_by_rank(job: Job, layouts: LayoutColumns, seconds: StageSeconds, total: FloatColumn) -> Stages:
    """Return the stages rank by rank. There are few distinct ways to cut the layers: each is counted once."""
    p, v, cut = layouts.pipeline, layouts.virtual_pipeline, layouts.partition
    _, example, which = np.unique(
        (cut * (v.max(initial=0) + 1) + v) * (p.max(initial=0) + 1) + p, return_index=True, return_inverse=True
    )
    ranks = all_ranks(job, layouts.take(example))
    slowest = [np.zeros(len(layouts)) for _ in range(5)]
    for place in range(len(example)):
        rows, mine = np.flatnonzero(which == place), ranks.layout_index == place
        contents = np.stack([ranks.dense_layers, ranks.moe_layers, ranks.first, ranks.last])[:, mine]
        # for a few ranks a set is faster than np.unique, whose first call imports numpy.ma besides
        for dense, mixture, first, last in sorted(set(zip(*contents.tolist(), strict=True))):
            rank_seconds = dense * seconds.dense_layer[rows] + mixture * seconds.mixture_layer[rows]
            rank_seconds = rank_seconds + first * seconds.first[rows] + last * seconds.last[rows]
            slower = rank_seconds > slowest[0][rows]
            for column, value in zip(slowest, (rank_seconds, dense, mixture, first, last), strict=True):
                column[rows] = np.where(slower, value, column[rows])
    return Stages(total, *slowest)
