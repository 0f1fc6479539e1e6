"""Pipeline stages that need not be even, for the layouts of a search: the layers by stage that balance best
(`stage_balance` says what that is), and those that balance best within the memory of every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, reduce

import numpy as np

from llmlaunch.cluster.profile import Cluster
from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn
from llmlaunch.layers.model import Model, model_of
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.estimator import stages_alike
from llmlaunch.memory.job import Job, layer_kinds, least
from llmlaunch.planner.stage_balance import (
    SAME,
    Costs,
    balance_alike,
    balance_kinds,
    empty_stages,
    leading_dense_layers,
)
from llmlaunch.timing.passes import fills_and_drains
from llmlaunch.timing.stages import heads_seconds, stage_seconds

Split = tuple[int, ...]

MOST_CELLS = 2_000_000  # seconds of ranks compared at a time


def costs_of(job: Job, cluster: Cluster, layouts: LayoutColumns) -> Costs:
    """Return the costs of the stages of every layout."""
    seconds = stage_seconds(job, cluster, layouts)
    heads, none = heads_seconds(job, seconds), np.zeros(len(layouts))
    ends = (heads, seconds.last) if job.techniques.heads_before_loss else (seconds.last + heads, none)
    model = model_of(job.shape)
    dense, mixture = (_mean(model, kinds, seconds.layers) if kinds else none for kinds in model.classes)
    return Costs(dense, mixture, seconds.first, *ends, kinds=seconds.layers)


def _mean(model: Model, kinds: Sequence[int], seconds: Sequence[FloatColumn]) -> FloatColumn:
    """Return the seconds of some kinds of layers in the mean of the model's layers of these."""
    if len(kinds) == 1:
        return seconds[kinds[0]]
    layers = sum(model.counts[kind] for kind in kinds)
    return reduce(np.add, (model.counts[kind] / layers * seconds[kind] for kind in kinds))


def balanced(job: Job, layouts: LayoutColumns, costs: Costs) -> LayoutColumns:
    """Return each layout with the layers by stage that balance best; partition 0 where those are even."""
    best: list[Split] = [()] * len(layouts)
    for rows, splits in _by_shape(job, layouts, costs):
        for row, split in zip(rows.tolist(), splits, strict=True):
            best[row] = split
    return _with_splits(layouts, best)


def balanced_within(
    job: Job, layouts: LayoutColumns, costs: Costs, limit_bytes: float, most: IntColumn | None = None
) -> tuple[IntColumn, LayoutColumns]:
    """Return row numbers, and those layouts with the layers by stage that balance best while every rank stays within
    the limit, with no more than `most` layers of the more frequent kind. Rows without such stages are left out, and so
    are those with several chunks to a rank, whose memory is judged afterwards."""
    rows = np.flatnonzero(layouts.virtual_pipeline == 1)
    if most is None or frequent_kind(layer_kinds(job.shape)) != layer_kinds(job.shape)[-1]:
        most = np.full(len(layouts), job.shape.num_layers)
    if empty_stages(job):
        pass  # the last rank holds no layers, and the one before it more than those before that
    elif stages_alike(job):
        from llmlaunch.planner.stage_capacities import may_hold_all  # imported only where memory limits the stages

        rows = rows[may_hold_all(job, layouts.take(rows), limit_bytes, most[rows])]
    elif leading_dense_layers(job) and len(rows):
        from llmlaunch.planner.stage_capacities import may_hold_mixtures

        rows = rows[may_hold_mixtures(job, layouts.take(rows), limit_bytes)]
    chosen, cost, most = layouts.take(rows), costs.take(rows), most[rows]
    if not len(rows):
        return rows, chosen
    splits = _one_chunk(job, chosen, cost, limit_bytes, most)
    solved = np.flatnonzero([len(split) > 0 for split in splits])
    return rows[solved], _with_splits(chosen.take(solved), [splits[row] for row in solved])


def most_layers(job: Job, layouts: LayoutColumns, costs: Costs, step_seconds: FloatColumn) -> IntColumn:
    """Return how many layers of the more frequent kind a stage of each layout, one chunk to a rank, may have if a step
    takes no more than `step_seconds`: of m micro-batches m times the slowest stage, and all the others once where the
    pipeline fills and drains (`timing/passes.py`)."""
    kinds = layer_kinds(job.shape)
    if job.techniques.trained_layers is not None:  # layers that run forward alone take less
        return np.full(len(layouts), len(kinds))
    m = np.maximum(layouts.num_microbatches(job.workload.global_batch_size), 1).astype(np.float64)
    slowest = step_seconds / m
    if fills_and_drains(job):
        whole = kinds.count(0) * costs.dense + kinds.count(1) * costs.mixture
        whole = whole + costs.first + costs.last + costs.loss
        once = np.divide(step_seconds - whole, m - 1.0, out=np.full(len(m), np.inf), where=m > 1.0)
        slowest = np.minimum(slowest, once)
    fastest = least(costs.kinds, model_of(job.shape).classes[frequent_kind(kinds)])
    layers = np.floor(slowest * (1.0 + SAME) / fastest)
    return np.clip(layers, 0, len(kinds)).astype(np.int64)


def _by_shape(job: Job, layouts: LayoutColumns, costs: Costs) -> Iterator[tuple[IntColumn, Sequence[Split]]]:
    """Yield row numbers, and the layers by stage of each row."""
    p, v, layers = layouts.pipeline, layouts.virtual_pipeline, job.shape.num_layers
    single = np.flatnonzero(v == 1)
    yield single, _one_chunk(job, layouts.take(single), costs.take(single))
    several = np.flatnonzero(v > 1)
    code = p[several] * (layers + 1) + v[several]
    for value in sorted(set(code.tolist())):
        rows = several[code == value]
        yield rows, _interleaved(job, int(p[rows[0]]), int(v[rows[0]]), costs.take(rows))


def _one_chunk(
    job: Job,
    layouts: LayoutColumns,
    costs: Costs,
    limit_bytes: float | None = None,
    most_layers: IntColumn | None = None,
) -> list[Split]:
    """Return the layers of each rank, within the limit where there is one; empty where there is no such split, or where
    a rank needs more than `most_layers` of the last layer's kind."""
    pipeline, dense = layouts.pipeline - empty_stages(job), leading_dense_layers(job)
    if stages_alike(job):
        layer, layers = costs.mixture if job.shape.moe is not None else costs.dense, job.shape.num_layers
        most = np.full((len(layouts), int(pipeline.max(initial=1))), layers)
        if limit_bytes is not None:
            from llmlaunch.planner.stage_capacities import capacities

            most = capacities(job, layouts, limit_bytes, most_layers)
        return _splits(job, balance_alike(layer, costs.first, costs.last, pipeline, layers, most)[0])
    if dense:
        from llmlaunch.planner.stage_capacities import balance_leading, mixture_capacities

        held = None if limit_bytes is None else mixture_capacities(job, layouts, limit_bytes, most_layers)
        return _splits(job, balance_leading(costs, pipeline, (dense, job.shape.num_layers - dense), held)[0])
    return [_of_any_kinds(job, layouts.take(np.array([row])), costs, row, limit_bytes) for row in range(len(layouts))]


def _splits(job: Job, table: IntColumn) -> list[Split]:
    """Return the layers by rank of each row, without what lies past its last rank; () where it has none."""
    splits = [tuple(count for count in row if count) for row in table.tolist()]
    return [(*split, *(0,) * empty_stages(job)) if split else () for split in splits]


def _of_any_kinds(job: Job, layout: LayoutColumns, costs: Costs, row: int, limit_bytes: float | None) -> Split:
    """Split layers whose kinds take turns, one chunk to a rank; empty where there is no such split."""
    layers = [float(costs.kinds[kind][row]) for kind in model_of(job.shape).order]
    empty = empty_stages(job)
    pipeline = int(layout.pipeline[0]) - empty
    fits: BoolColumn | None = None
    if limit_bytes is not None:
        from llmlaunch.planner.stage_capacities import fitting

        fits = fitting(job, layout, limit_bytes)[:pipeline]
    split = balance_kinds(layers, float(costs.first[row]), float(costs.last[row]), pipeline, fits)
    return (*split, *(0,) * empty) if split else ()


def _interleaved(job: Job, p: int, v: int, costs: Costs) -> list[Split]:
    """Split layers over several chunks to a rank: all virtual stages are equal except the first and the last, which
    balance best. Chunks that differ in the middle would wait for each other, whatever their ranks add up to."""
    empty = empty_stages(job)
    choices, dense, mixture = _interleaved_choices(tuple(layer_kinds(job.shape)), p, v, empty)
    if not choices:
        return [()] * len(costs.dense)
    best = np.empty(len(costs.dense), dtype=np.int64)
    at_once = max(MOST_CELLS // dense.size, 1)
    for start in range(0, len(best), at_once):
        part = slice(start, start + at_once)
        ranks = np.multiply.outer(costs.dense[part], dense) + np.multiply.outer(costs.mixture[part], mixture)
        ranks[:, :, 0] += costs.first[part, None]
        ranks[:, :, -1 - empty] += costs.last[part, None]
        ranks[:, :, -1] += costs.loss[part, None]
        best[part] = np.argmin(ranks.max(axis=2), axis=1)
    return [choices[index] for index in best.tolist()]


@lru_cache(maxsize=4096)
def _interleaved_choices(kinds: Split, p: int, v: int, empty: int) -> tuple[list[Split], FloatColumn, FloatColumn]:
    """Return the layers by virtual stage to choose from, of which the last `empty` have none, and the dense and mixture
    layers of each one's ranks."""
    full, none = p * v - empty, (0,) * empty
    choices = [(first, *(usual,) * (full - 2), last, *none) for first, usual, last in _ends(len(kinds), full)]
    before = np.concatenate([[0], np.cumsum(kinds)])
    table = np.array(choices, dtype=np.int64).reshape(-1, p * v)
    ends = np.concatenate([np.zeros((len(table), 1), dtype=np.int64), np.cumsum(table, axis=1)], axis=1)
    mixture = np.diff(before[ends], axis=1).reshape(-1, v, p).sum(axis=1)
    return choices, (table.reshape(-1, v, p).sum(axis=1) - mixture).astype(np.float64), mixture.astype(np.float64)


def least_layers(job: Job, p: int, v: int) -> FloatColumn:
    """Return the fewest dense and mixture layers that each rank holds with uneven stages (2 x ranks): one chunk holds
    any number of layers, several are cut in few ways."""
    if v == 1:
        return np.zeros((2, p))
    choices, dense, mixture = _interleaved_choices(tuple(layer_kinds(job.shape)), p, v, empty_stages(job))
    return np.array([dense.min(axis=0), mixture.min(axis=0)]) if choices else np.zeros((2, p))


def frequent_kind(kinds: Sequence[int]) -> int:
    """Return 1 if most layers are mixtures, else 0."""
    return int(2 * sum(kinds) > len(kinds))


def fullest_stage(job: Job, layouts: LayoutColumns) -> tuple[IntColumn, IntColumn]:
    """Return how many dense and mixture layers some rank of each layout holds at least, however uneven stages are cut:
    of the more frequent kind, and none where stages are even."""
    kinds = tuple(layer_kinds(job.shape))
    code = layouts.pipeline * (len(kinds) + 1) + layouts.virtual_pipeline
    different, place = np.unique(np.where(layouts.uneven, code, 0), return_inverse=True)
    sizes = [divmod(value, len(kinds) + 1) for value in different.tolist()]
    fewest = [_fewest_on_the_fullest(kinds, p, v, empty_stages(job)) if p else 0 for p, v in sizes]
    layers = np.array(fewest, dtype=np.int64)[place]
    return (0 * layers, layers) if frequent_kind(kinds) else (layers, 0 * layers)


def have_cuts(job: Job, layouts: LayoutColumns) -> BoolColumn:
    """Whether there is a way to cut the stages of each layout, all of which are uneven: several chunks of a rank are
    cut in few ways, and many sizes have none."""
    kinds = tuple(layer_kinds(job.shape))
    code = layouts.pipeline * (len(kinds) + 1) + layouts.virtual_pipeline
    different, place = np.unique(code, return_inverse=True)
    sizes, empty = [divmod(value, len(kinds) + 1) for value in different.tolist()], empty_stages(job)
    some = [v == 1 or len(_interleaved_choices(kinds, p, v, empty)[0]) > 0 for p, v in sizes]
    return np.array(some, dtype=np.bool_)[place]


def _fewest_on_the_fullest(kinds: Split, p: int, v: int, empty: int) -> int:
    """Return how many layers of the more frequent kind the rank with most of them holds at least."""
    kind = frequent_kind(kinds)
    if v == 1:
        return -(-kinds.count(kind) // p)
    choices, dense, mixture = _interleaved_choices(kinds, p, v, empty)
    return int((mixture if kind else dense).max(axis=1).min()) if choices else 0


def _ends(layers: int, stages: int) -> Iterator[tuple[int, int, int]]:
    """Yield (layers of the first virtual stage, of each between, of the last)."""
    for usual in (layers // stages, layers // stages + 1):
        left = layers - (stages - 2) * usual
        for first in range(1, min(usual + 1, left) + 1):
            if usual and 0 <= left - first <= usual:
                yield first, usual, left - first


def _with_splits(layouts: LayoutColumns, splits: Sequence[Split]) -> LayoutColumns:
    partitions: dict[Split, int] = {(): 0}
    codes = {
        split: partitions.setdefault(split if len(set(split)) > 1 else (), len(partitions))
        for split in dict.fromkeys(splits)
    }
    partition = np.array([codes[split] for split in splits], dtype=np.int64)
    return replace(layouts, partition=partition, partitions=tuple(partitions))
