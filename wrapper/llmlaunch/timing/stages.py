"""Seconds of pipeline stages: what one layer costs, what the ends add, and which stage is the slowest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from llmlaunch.cluster.profile import Cluster
from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.columns import Size
from llmlaunch.layers.matrix import OUTPUTS, Matrix, Part
from llmlaunch.layers.model import model_of
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.job import Job, all_ranks, head_rank, least
from llmlaunch.models.sections import Multipliers
from llmlaunch.timing.effects import TimeEffect, time_effects
from llmlaunch.timing.layers import Collectives, LayerSeconds, forward_only, layer_seconds
from llmlaunch.timing.network import expert_exchange, tensor_pass
from llmlaunch.timing.products import DevicePace, SplitColumns, pace, rates, split_of


@frozen
class StageSeconds:
    """Columns of seconds, forward and backward of one micro-batch: of one layer of each kind of the model (`layers`),
    and what the first stage (embedding) and the last (norm, head, loss) do beside their layers. The `frozen` ones are
    of layers that run forward alone, None where all run backward."""

    layers: tuple[FloatColumn, ...]
    first: FloatColumn
    last: FloatColumn
    frozen: tuple[FloatColumn, ...] | None = None

    def take(self, index: IntColumn) -> StageSeconds:
        frozen = None if self.frozen is None else tuple(column[index] for column in self.frozen)
        layers = tuple(column[index] for column in self.layers)
        return StageSeconds(layers, self.first[index], self.last[index], frozen)


@frozen
class Ends:
    """Seconds of the first and the last stage beside their layers, by kind."""

    first: Mapping[str, FloatColumn]
    last: Mapping[str, FloatColumn]


@frozen
class Pieces:
    """The parts of stages: a layer of each kind of the model, and the same that run forward alone, empty where all run
    backward; and the ends."""

    layers: tuple[LayerSeconds, ...]
    ends: Ends
    seconds: StageSeconds
    frozen: tuple[LayerSeconds, ...] = ()


# layers that are no mixtures, and mixtures, that some stage of each layout holds at least
FullestStage = tuple[IntColumn, IntColumn]
Counts = tuple[FloatColumn, ...]  # layers of each kind


@frozen
class Stages:
    """Seconds of one micro-batch through all stages of each layout, seconds of the slowest stage, its layers of each
    kind that run backward, 1 where it is the first, the last or that of prediction heads, and its layers that run
    forward alone, empty where there are none."""

    all_seconds: FloatColumn
    slowest_seconds: FloatColumn
    layers: Counts
    first: FloatColumn
    last: FloatColumn
    heads: FloatColumn
    frozen: Counts = ()


def stage_seconds(job: Job, cluster: Cluster, layouts: LayoutColumns) -> StageSeconds:
    """Return the seconds of one micro-batch in each kind of layer and at both ends, for every layout."""
    return pieces(job, cluster, split_of(job, layouts)).seconds


def pieces(job: Job, cluster: Cluster, at: SplitColumns) -> Pieces:
    """Return the parts of stages, with their seconds by kind."""
    speed = pace(job, cluster)
    one_pass = tensor_pass(job, cluster, at)
    model = model_of(job.shape)
    expert = None if model.mixture is None else expert_exchange(job, cluster, at, model.mixture)
    alike = Collectives(one_pass, expert)
    layers = tuple(layer_seconds(job, cluster, at, speed, alike, layer) for layer in model.kinds)
    ends = _ends(job, cluster, at, speed, one_pass)
    seconds = StageSeconds(tuple(layer.seconds for layer in layers), _sum(ends.first), _sum(ends.last))
    if job.techniques.trained_layers is None:
        return Pieces(layers, ends, seconds)
    frozen = tuple(forward_only(layer, at) for layer in layers)
    return Pieces(layers, ends, replace(seconds, frozen=tuple(layer.seconds for layer in frozen)), frozen)


def _sum(kinds: Mapping[str, FloatColumn]) -> FloatColumn:
    total: FloatColumn = sum(kinds.values())  # type: ignore[assignment]
    return total


def _ends(job: Job, cluster: Cluster, at: SplitColumns, pace: DevicePace, one_pass: FloatColumn) -> Ends:
    """Return the seconds of both ends. Embedding: rows looked up and their gradients added, a scatter over tensor
    parallelism and its reverse. Head: the input gathered, the product, the logits read and written by the loss about as
    often as they are kept alive, the gradient scattered beside the weight's. Gathered logits travel once too, a
    vocabulary wide. A vision encoder runs before all."""
    shape, facts = job.shape, job.facts
    hidden = facts.layer.activation_bytes * shape.hidden_size / pace.element_wise
    exchange = 2.0 * one_pass
    looked_up = 0.0 * one_pass if facts.states.embedding_whole else exchange
    # a table that is not trained has no backward pass
    trained = 0.5 if job.techniques.adapters is not None or job.techniques.trained_layers is not None else 1.0
    constants = shape.multipliers or Multipliers()
    first = {"element_wise": (trained * 4.0 * hidden) * at.tokens, "tensor_parallel": trained * looked_up}
    if constants.embedding is not None:
        first["element_wise"] = 2.0 * first["element_wise"]  # which reads and writes as much
    if shape.vision is not None:
        from llmlaunch.timing.vision import encoder_seconds

        for kind, column in encoder_seconds(job, cluster, at, pace).items():
            first[kind] = first[kind] + column if kind in first else column
    vocabulary = float(shape.vocab_size)
    product = rates(job, pace, [Matrix(float(shape.hidden_size), (Part("", vocabulary),), OUTPUTS)], wide=True)
    head = product.work(at.tokens, at.share, at.per_tensor)
    passes = 1.0 if facts.loss.fused_loss is not None else 3.0
    logit_traffic = passes * (facts.loss.logit_bytes + facts.loss.logit_gradient_bytes)
    for effect in time_effects(job, TimeEffect.logit_bytes):
        logit_traffic = effect(logit_traffic)
    if constants.logits is not None:
        logit_traffic = logit_traffic + 4.0 * facts.layer.activation_bytes  # read and written forward and backward
    over = at.tokens if facts.loss.logits_gathered else at.share
    loss = (logit_traffic / pace.element_wise * vocabulary + 4.0 * hidden) * over
    if facts.loss.logits_gathered:
        exchange = exchange + (vocabulary / shape.hidden_size) * one_pass
    last = {"matrix_products": head.both, "element_wise": loss, "tensor_parallel": exchange}
    for again in time_effects(job, TimeEffect.repeated_head):
        last["recompute"] = last["recompute"] + again(head) if "recompute" in last else again(head)
    if shape.mtp_num_layers:
        last = {name: (1.0 + shape.mtp_num_layers) * column for name, column in last.items()}
    return Ends(first, last)


def stages(job: Job, layouts: LayoutColumns, seconds: StageSeconds) -> Stages:
    """Return the layers of the slowest stage and the seconds of all. The head makes the last of even stages the
    slowest."""
    last = seconds.last + heads_seconds(job, seconds)
    total = _all_layers(job, seconds) + seconds.first + last
    if len(seconds.layers) > 1 or np.any(layouts.uneven) or seconds.frozen is not None:
        return _rank_by_rank(job, layouts, seconds, total)
    p = layouts.pipeline
    each = job.shape.num_layers / p
    slowest = each * seconds.layers[0] + np.where(p > 1, np.maximum(seconds.first, last), seconds.first + last)
    ends = np.asarray(last >= seconds.first, dtype=np.float64)
    first = np.where(p > 1, 1.0 - ends, 1.0)
    ends_last = np.where(p > 1, ends, 1.0)
    return Stages(total, slowest, (each,), first, ends_last, ends_last)


def stages_in_balance(
    job: Job, layouts: LayoutColumns, seconds: StageSeconds, fullest: FullestStage | None = None
) -> Stages:
    """Return stages that all take the same time, as if layers could be cut anywhere; the slowest takes no less than
    what the `fullest` holds."""
    model = model_of(job.shape)
    total = _all_layers(job, seconds) + seconds.first + seconds.last + heads_seconds(job, seconds)
    share = 1.0 / layouts.pipeline
    slowest = share * total
    if fullest is not None and job.techniques.trained_layers is None:  # those that run forward alone take less
        held = [
            held * least(seconds.layers, kinds) for held, kinds in zip(fullest, model.classes, strict=True) if kinds
        ]
        slowest = np.maximum(slowest, reduce(np.add, held))
    below = _frozen_layers(job)
    layers = tuple(share * (count - frozen) for count, frozen in zip(model.counts, below, strict=True))
    frozen = () if seconds.frozen is None else tuple(share * count for count in below)
    return Stages(total, slowest, layers, share, share, share, frozen)


def _frozen_layers(job: Job) -> tuple[int, ...]:
    """Return the numbers of layers of each kind below all that are trained."""
    trained, model = job.techniques.trained_layers, model_of(job.shape)
    below = 0 if trained is None else max(len(model.order) - trained, 0)
    return tuple(int(before[below]) for before in model.before)


def _all_layers(job: Job, seconds: StageSeconds) -> FloatColumn:
    """Return the seconds of one micro-batch in all layers."""
    total = of_counts(model_of(job.shape).counts, seconds.layers)
    if seconds.frozen is None:
        return total
    spared = [both - forward for both, forward in zip(seconds.layers, seconds.frozen, strict=True)]
    return total - of_counts(_frozen_layers(job), spared)


def of_counts(counts: Sequence[Size], of_kinds: Sequence[FloatColumn]) -> FloatColumn:
    """Return what so many layers of each kind take together; kinds that do not occur are left out."""
    products = [count * each for count, each in zip(counts, of_kinds, strict=True) if np.any(count)]
    return reduce(np.add, products) if products else np.zeros_like(of_kinds[0])


def heads_seconds(job: Job, seconds: StageSeconds) -> FloatColumn:
    """Return the seconds of the layers of multi-token prediction, which lie on one stage."""
    return of_counts(heads_layers(job), seconds.layers)


def heads_layers(job: Job) -> tuple[int, ...]:
    """Return how many layers of each kind all modules of multi-token prediction have together."""
    model = model_of(job.shape)
    return tuple(job.shape.mtp_num_layers * model.predicts.count(kind) for kind in range(len(model.kinds)))


def _rank_by_rank(job: Job, layouts: LayoutColumns, seconds: StageSeconds, total: FloatColumn) -> Stages:
    """Return the stages rank by rank. There are few distinct ways to cut the layers: each is counted once."""
    p, v, cut = layouts.pipeline, layouts.virtual_pipeline, layouts.partition
    _, example, which = np.unique(
        (cut * (v.max(initial=0) + 1) + v) * (p.max(initial=0) + 1) + p, return_index=True, return_inverse=True
    )
    contents, kinds = _contents(job, layouts.take(example)), len(seconds.layers)
    columns = (
        *seconds.layers,
        seconds.first,
        seconds.last,
        heads_seconds(job, seconds),
        *(seconds.frozen or ()),
    )
    slowest = np.full(len(layouts), -1.0)
    rank = np.zeros(len(layouts), dtype=np.int64)
    for place in range(contents.shape[1]):  # of the ranks that differ, a few
        held = zip(contents[:, place].T, columns, strict=True)
        products = (count[which] * column for count, column in held if np.any(count))
        rank_seconds = reduce(np.add, products, np.zeros(len(layouts)))
        slower = rank_seconds > slowest
        slowest, rank = np.where(slower, rank_seconds, slowest), np.where(slower, place, rank)
    of_slowest = tuple(column[which, rank] for column in np.moveaxis(contents, 2, 0))
    first, last, of_heads = of_slowest[kinds : kinds + 3]
    return Stages(total, slowest, of_slowest[:kinds], first, last, of_heads, of_slowest[kinds + 3 :])


def _contents(job: Job, layouts: LayoutColumns) -> FloatColumn:
    """Return the different ranks of each layout: layers of each kind that run backward, whether it is the first, the
    last, that of prediction heads, and where there are such layers those of each kind that run forward alone (layouts x
    ranks that differ x these). Layouts with fewer ranks that differ repeat one."""
    ranks = all_ranks(job, layouts)
    counts, below = ranks.counts, tuple[FloatColumn, ...]()
    for run_backward in time_effects(job, TimeEffect.run_backward):
        counts = tuple(run_backward(job, ranks))
        below = tuple(held - trained for held, trained in zip(ranks.counts, counts, strict=True))
    heads = ranks.rank == head_rank(job, ranks.layouts)
    rows = np.stack([ranks.layout_index, *counts, ranks.first, ranks.last, heads, *below], axis=1)
    rows = rows[np.lexsort(rows.T[::-1])]
    rows = rows[np.concatenate([[True], np.any(rows[1:] != rows[:-1], axis=1)])] if len(rows) else rows
    index = rows[:, 0].astype(np.int64)
    count = np.bincount(index, minlength=len(layouts))
    start = np.cumsum(count) - count
    place = np.minimum(np.arange(count.max(initial=1)), count[:, None] - 1)
    distinct: FloatColumn = rows[start[:, None] + place, 1:]
    return distinct
