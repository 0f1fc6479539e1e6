"""Seconds of pipeline stages: what one layer costs, what the ends add, and which stage is the slowest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from llmlaunch.cluster.profile import Cluster
from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.frozen import frozen
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.heads import head_rank
from llmlaunch.memory.job import Job, all_ranks, mixture_layers
from llmlaunch.memory.weights import trained_counts
from llmlaunch.models.kinds import head_kinds
from llmlaunch.models.linears import Linear
from llmlaunch.timing.exchange import tensor_pass
from llmlaunch.timing.layers import LayerSeconds, dense_layer, forward_only, mixture_layer
from llmlaunch.timing.products import DevicePace, SplitColumns, pace, rates, split_of
from llmlaunch.timing.vision import encoder_seconds

__all__ = [
    "EAGER_LOSS_BYTES",
    "NATIVE_LOSS_BYTES",
    "Ends",
    "FullestStage",
    "Pieces",
    "StageSeconds",
    "Stages",
    "heads_seconds",
    "pieces",
    "stage_seconds",
    "stages",
    "stages_in_balance",
]


# Per logit of a compiled loss. Kernel by kernel the eager one reads and writes 52 bytes (to fp32, maximum, difference,
# exponential, sum, quotient, gradient, to bf16), the compiled one 32 (megatron/core/tensor_parallel/cross_entropy.py,
# fusions/fused_cross_entropy.py, core 0.19); of the first 24 are counted, because parts stay in the cache.
EAGER_LOSS_BYTES = 24.0
NATIVE_LOSS_BYTES = EAGER_LOSS_BYTES * 32.0 / 52.0


@frozen
class StageSeconds:
    """Columns of seconds, forward and backward of one micro-batch: of one dense and of one mixture layer, and what the
    first stage (embedding) and the last (norm, head, loss) do beside their layers. Zero for what a model has not. The
    `frozen` ones are of a layer of either kind that runs forward alone, None where all run backward."""

    dense_layer: FloatColumn
    mixture_layer: FloatColumn
    first: FloatColumn
    last: FloatColumn
    frozen: tuple[FloatColumn, FloatColumn] | None = None

    def take(self, index: IntColumn) -> StageSeconds:
        columns = (self.dense_layer[index], self.mixture_layer[index], self.first[index], self.last[index])
        return StageSeconds(*columns, None if self.frozen is None else (self.frozen[0][index], self.frozen[1][index]))


@frozen
class Ends:
    """Seconds of the first and the last stage beside their layers, by kind."""

    first: Mapping[str, FloatColumn]
    last: Mapping[str, FloatColumn]


@frozen
class Pieces:
    """The parts of stages; None where a model has no such layer. `frozen` are its layers, dense and mixture, that run
    forward alone."""

    dense: LayerSeconds | None
    mixture: LayerSeconds | None
    ends: Ends
    seconds: StageSeconds
    frozen: tuple[LayerSeconds | None, LayerSeconds | None] = (None, None)


FullestStage = tuple[IntColumn, IntColumn]  # dense and mixture layers that some stage of each layout holds at least


@frozen
class Stages:
    """Seconds of one micro-batch through all stages of each layout, seconds of the slowest stage, its layers that run
    backward, 1 where it is the first, the last or that of prediction heads, and its layers that run forward alone."""

    all_seconds: FloatColumn
    slowest_seconds: FloatColumn
    dense_layers: FloatColumn
    mixture_layers: FloatColumn
    first: FloatColumn
    last: FloatColumn
    heads: FloatColumn
    frozen_dense_layers: FloatColumn
    frozen_mixture_layers: FloatColumn


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
    ends = _ends(job, cluster, at, speed, one_pass)
    zero = np.zeros(len(at))
    seconds = StageSeconds(
        zero if dense is None else dense.seconds,
        zero if mixture is None else mixture.seconds,
        _sum(ends.first),
        _sum(ends.last),
    )
    if job.techniques.trained_layers is None:
        return Pieces(dense, mixture, ends, seconds)
    layers = tuple(None if layer is None else forward_only(layer, at) for layer in (dense, mixture))
    columns = tuple(zero if layer is None else layer.seconds for layer in layers)
    return Pieces(dense, mixture, ends, replace(seconds, frozen=(columns[0], columns[1])), (layers[0], layers[1]))


def _sum(kinds: Mapping[str, FloatColumn]) -> FloatColumn:
    total: FloatColumn = sum(kinds.values())  # type: ignore[assignment]
    return total


def _ends(job: Job, cluster: Cluster, at: SplitColumns, pace: DevicePace, one_pass: FloatColumn) -> Ends:
    """Return the seconds of both ends. Embedding: rows looked up and their gradients added, a scatter over tensor
    parallelism and its reverse. Head: the input gathered, the product, the logits read and written by the loss about as
    often as they are kept alive, the gradient scattered beside the weight's. Gathered logits travel once too, a
    vocabulary wide. A tiled loss repeats the forward product (Luo et al. 2024, MsT). A vision encoder runs before
    all."""
    shape, facts = job.shape, job.facts
    hidden = facts.activation_bytes * shape.hidden_size / pace.element_wise
    exchange = 2.0 * one_pass
    looked_up = 0.0 * one_pass if facts.embedding_whole else exchange
    # a table that is not trained has no backward pass
    trained = 0.5 if job.techniques.adapters is not None or job.techniques.trained_layers is not None else 1.0
    first = {"element_wise": (trained * 4.0 * hidden) * at.tokens, "tensor_parallel": trained * looked_up}
    for kind, column in encoder_seconds(job, cluster, at, pace).items():
        first[kind] = first[kind] + column if kind in first else column
    vocabulary = float(shape.vocab_size)
    product = rates(job, pace, [Linear(float(shape.hidden_size), vocabulary, "outputs")], wide=True)
    head = product.work(at.tokens, at.share, at.per_tensor)
    logit_traffic = (1.0 if facts.fused_loss is not None else 3.0) * (facts.logit_bytes + facts.logit_gradient_bytes)
    if job.techniques.loss in ("native", "te"):  # nobody has measured Transformer Engine's, which moves fewer bytes
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
    last = seconds.last + heads_seconds(job, seconds)
    dense, mixture = float(len(pattern) - sum(pattern)), float(sum(pattern))
    total = _all_layers(job, seconds) + seconds.first + last
    if (dense and mixture) or np.any(layouts.uneven) or seconds.frozen is not None:
        return _rank_by_rank(job, layouts, seconds, total)
    p = layouts.pipeline
    each = shape.num_layers / p
    layer = seconds.dense_layer if dense else seconds.mixture_layer
    slowest = each * layer + np.where(p > 1, np.maximum(seconds.first, last), seconds.first + last)
    none, ends = np.zeros(len(layouts)), np.asarray(last >= seconds.first, dtype=np.float64)
    first = np.where(p > 1, 1.0 - ends, 1.0)
    ends_last = np.where(p > 1, ends, 1.0)
    of_dense, of_mixtures = (each, none) if dense else (none, each)
    return Stages(total, slowest, of_dense, of_mixtures, first, ends_last, ends_last, none, none)


def stages_in_balance(
    job: Job, layouts: LayoutColumns, seconds: StageSeconds, fullest: FullestStage | None = None
) -> Stages:
    """Return stages that all take the same time, as if layers could be cut anywhere; the slowest takes no less than
    what the `fullest` holds."""
    shape = job.shape
    mixture = float(sum(shape.moe.layer_pattern)) if shape.moe else 0.0
    dense = shape.num_layers - mixture
    total = _all_layers(job, seconds) + seconds.first + seconds.last + heads_seconds(job, seconds)
    share = 1.0 / layouts.pipeline
    frozen_dense, frozen_mixture = _frozen_layers(job)
    slowest = share * total
    if fullest is not None and job.techniques.trained_layers is None:  # those that run forward alone take less
        slowest = np.maximum(slowest, fullest[0] * seconds.dense_layer + fullest[1] * seconds.mixture_layer)
    return Stages(
        total,
        slowest,
        share * (dense - frozen_dense),
        share * (mixture - frozen_mixture),
        share,
        share,
        share,
        share * frozen_dense,
        share * frozen_mixture,
    )


def _frozen_layers(job: Job) -> tuple[float, float]:
    """Return the numbers of (dense, mixture) layers below all that are trained."""
    trained, shape = job.techniques.trained_layers, job.shape
    below = 0 if trained is None else max(shape.num_layers - trained, 0)
    mixture = sum(shape.moe.layer_pattern[:below]) if shape.moe else 0
    return float(below - mixture), float(mixture)


def _all_layers(job: Job, seconds: StageSeconds) -> FloatColumn:
    """Return the seconds of one micro-batch in all layers."""
    shape = job.shape
    mixture = float(sum(shape.moe.layer_pattern)) if shape.moe else 0.0
    total = (shape.num_layers - mixture) * seconds.dense_layer + mixture * seconds.mixture_layer
    if seconds.frozen is None:
        return total
    below, spared = _frozen_layers(job), zip(seconds.frozen, (seconds.dense_layer, seconds.mixture_layer), strict=True)
    return total - sum(count * (both - forward) for count, (forward, both) in zip(below, spared, strict=True))


def heads_seconds(job: Job, seconds: StageSeconds) -> FloatColumn:
    """Return the seconds of the layers of multi-token prediction, which lie on one stage."""
    dense, mixture = head_kinds(job.shape)
    return job.shape.mtp_num_layers * (dense * seconds.dense_layer + mixture * seconds.mixture_layer)


def _rank_by_rank(job: Job, layouts: LayoutColumns, seconds: StageSeconds, total: FloatColumn) -> Stages:
    """Return the stages rank by rank. There are few distinct ways to cut the layers: each is counted once."""
    p, v, cut = layouts.pipeline, layouts.virtual_pipeline, layouts.partition
    _, example, which = np.unique(
        (cut * (v.max(initial=0) + 1) + v) * (p.max(initial=0) + 1) + p, return_index=True, return_inverse=True
    )
    contents = _contents(job, layouts.take(example))
    frozen = seconds.frozen or (np.zeros(len(layouts)),) * 2
    heads = heads_seconds(job, seconds)
    columns = (seconds.dense_layer, seconds.mixture_layer, seconds.first, seconds.last, heads, *frozen)
    slowest = np.full(len(layouts), -1.0)
    rank = np.zeros(len(layouts), dtype=np.int64)
    for place in range(contents.shape[1]):  # of the ranks that differ, a few
        counts = contents[which, place].T
        rank_seconds = sum(count * column for count, column in zip(counts, columns, strict=True) if np.any(count))
        slower = rank_seconds > slowest
        slowest, rank = np.where(slower, rank_seconds, slowest), np.where(slower, place, rank)
    return Stages(total, slowest, *contents[which, rank].T)


def _contents(job: Job, layouts: LayoutColumns) -> FloatColumn:
    """Return the different ranks of each layout: dense layers and mixtures that run backward, whether it is the first,
    the last, that of prediction heads, and layers of both kinds that run forward alone (layouts x ranks that differ x
    7). Layouts with fewer ranks that differ repeat one."""
    ranks = all_ranks(job, layouts)
    trained = replace(ranks, counts=trained_counts(job, ranks))
    mixture = mixture_layers(job, trained)
    dense, mixtures = trained.layers - mixture, mixture_layers(job, ranks)
    below = ranks.layers - mixtures - dense, mixtures - mixture
    heads = ranks.rank == head_rank(job, ranks.layouts)
    rows = np.stack([ranks.layout_index, dense, mixture, ranks.first, ranks.last, heads, *below], axis=1)
    rows = rows[np.lexsort(rows.T[::-1])]
    rows = rows[np.concatenate([[True], np.any(rows[1:] != rows[:-1], axis=1)])] if len(rows) else rows
    index = rows[:, 0].astype(np.int64)
    count = np.bincount(index, minlength=len(layouts))
    start = np.cumsum(count) - count
    place = np.minimum(np.arange(count.max(initial=1)), count[:, None] - 1)
    distinct: FloatColumn = rows[start[:, None] + place, 1:]
    return distinct
