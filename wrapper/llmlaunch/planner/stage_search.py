"""Layers by stage for many splits at once: the best balance, and the best balance that memory allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmlaunch.cluster.profile import Cluster
from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.terms import rank_terms
from llmlaunch.planner.stage_balance import balance_alike, balance_kinds
from llmlaunch.timing.stages import last_seconds, stage_seconds

__all__ = ["Costs", "balanced", "balanced_within", "capacities", "costs_of", "fitting"]

Split = tuple[int, ...]

PIECE = 8192  # ranks priced at a time, so that the columns of the formula stay in the processor's cache
CHORDS = 3  # interpolations before plain bisection: bytes are nearly affine in the layers


@dataclass(frozen=True)
class Costs:
    """Seconds of one micro-batch, forward and backward: of a layer of each kind, and of what the first and the last
    stage do beside their layers."""

    dense: FloatColumn
    mixture: FloatColumn
    first: FloatColumn
    last: FloatColumn

    def take(self, index: IntColumn) -> Costs:
        return Costs(self.dense[index], self.mixture[index], self.first[index], self.last[index])


def costs_of(job: Job, cluster: Cluster, layouts: LayoutColumns) -> Costs:
    """Return the costs of the stages of every layout."""
    seconds = stage_seconds(job, cluster, layouts)
    return Costs(seconds.dense_layer, seconds.mixture_layer, seconds.first, last_seconds(job, seconds))


def balanced(job: Job, layouts: LayoutColumns, costs: Costs) -> LayoutColumns:
    """Return each layout with the layers by stage that balance best; partition 0 where those are even."""
    best: list[Split] = [()] * len(layouts)
    for rows, splits in _by_shape(job, layouts, costs):
        for row, split in zip(rows.tolist(), splits, strict=True):
            best[row] = split
    return _with_splits(layouts, best)


def balanced_within(
    job: Job, layouts: LayoutColumns, costs: Costs, limit_bytes: float
) -> tuple[IntColumn, LayoutColumns]:
    """Return row numbers, and those layouts with the layers by stage that balance best while every rank stays within
    the limit. Rows without such stages are left out, and so are those with several chunks to a rank, whose memory is
    judged afterwards."""
    rows = np.flatnonzero(layouts.virtual_pipeline == 1)
    chosen, cost = layouts.take(rows), costs.take(rows)
    if not len(rows):
        return rows, chosen
    if job.stages_alike:
        splits = _equal_layers(job, chosen, cost, capacities(job, chosen, limit_bytes))
    else:
        each = (chosen.take(np.array([row])) for row in range(len(rows)))
        splits = [
            _two_kinds(job, layout, cost, row, fitting(job, layout, limit_bytes)) for row, layout in enumerate(each)
        ]
    solved = np.flatnonzero([len(split) > 0 for split in splits])
    return rows[solved], _with_splits(chosen.take(solved), [splits[row] for row in solved])


def _pattern(job: Job) -> Sequence[int]:
    return job.shape.moe.layer_pattern if job.shape.moe else (0,) * job.shape.num_layers


def _by_shape(job: Job, layouts: LayoutColumns, costs: Costs) -> Iterator[tuple[IntColumn, Sequence[Split]]]:
    """Yield row numbers, and the layers by stage of each row."""
    p, v, layers = layouts.pipeline, layouts.virtual_pipeline, job.shape.num_layers
    single = np.flatnonzero(v == 1)
    if job.stages_alike:
        most = np.full((len(single), int(p.max(initial=1))), layers)
        yield single, _equal_layers(job, layouts.take(single), costs.take(single), most)
    else:
        yield single, [_two_kinds(job, layouts.take(np.array([row])), costs, row) for row in single.tolist()]
    several = np.flatnonzero(v > 1)
    code = p[several] * (layers + 1) + v[several]
    for value in np.unique(code):
        rows = several[code == value]
        yield rows, _interleaved(job, int(p[rows[0]]), int(v[rows[0]]), costs.take(rows))


def _equal_layers(job: Job, layouts: LayoutColumns, costs: Costs, most: IntColumn) -> list[Split]:
    """Split equal layers, one chunk to a rank, no more than `most` layers each; empty where there is no such split."""
    layer = costs.mixture if job.shape.moe is not None else costs.dense
    table, _ = balance_alike(layer, costs.first, costs.last, layouts.pipeline, job.shape.num_layers, most)
    return [tuple(count for count in row if count) for row in table.tolist()]


def _two_kinds(job: Job, layout: LayoutColumns, costs: Costs, row: int, fits: BoolColumn | None = None) -> Split:
    """Split layers of two kinds, one chunk to a rank; empty where there is no such split."""
    layers = [float(costs.mixture[row] if kind else costs.dense[row]) for kind in _pattern(job)]
    split = balance_kinds(layers, float(costs.first[row]), float(costs.last[row]), int(layout.pipeline[0]), fits)
    return split or ()


def _interleaved(job: Job, p: int, v: int, costs: Costs) -> list[Split]:
    """Split layers over several chunks to a rank: all virtual stages are equal except the first and the last, which
    balance best. Chunks that differ in the middle would wait for each other, whatever their ranks add up to."""
    choices = [(first, *(usual,) * (p * v - 2), last) for first, usual, last in _ends(job.shape.num_layers, p * v)]
    if not choices:
        return [()] * len(costs.dense)
    slowest = [_slowest(job, p, split, costs) for split in choices]
    return [choices[best] for best in np.argmin(slowest, axis=0)]


def _ends(layers: int, stages: int) -> Iterator[tuple[int, int, int]]:
    """Yield (layers of the first virtual stage, of each between, of the last)."""
    for usual in (layers // stages, layers // stages + 1):
        left = layers - (stages - 2) * usual
        for first in range(1, min(usual + 1, left) + 1):
            if usual and 0 <= left - first <= usual:
                yield first, usual, left - first


def _slowest(job: Job, p: int, split: Split, costs: Costs) -> FloatColumn:
    """Return the seconds of the slowest rank for every row."""
    before = np.concatenate([[0], np.cumsum(_pattern(job))])
    ends = np.concatenate([[0], np.cumsum(split)])
    mixture = np.diff(before[ends]).reshape(-1, p).sum(axis=0)
    dense = np.array(split).reshape(-1, p).sum(axis=0) - mixture
    ranks = np.multiply.outer(costs.dense, dense) + np.multiply.outer(costs.mixture, mixture)
    ranks[:, 0] += costs.first
    ranks[:, -1] += costs.last
    return np.asarray(ranks.max(axis=1))


def _with_splits(layouts: LayoutColumns, splits: Sequence[Split]) -> LayoutColumns:
    partitions: dict[Split, int] = {(): 0}
    partition = [partitions.setdefault(split if len(set(split)) > 1 else (), len(partitions)) for split in splits]
    return replace(layouts, partition=np.array(partition, dtype=np.int64), partitions=tuple(partitions))


def capacities(job: Job, layouts: LayoutColumns, limit_bytes: float) -> IntColumn:
    """Return the most layers each rank of every layout can hold within `limit_bytes` of device memory, if the other
    ranks hold at least one each (rows x most ranks; 0 where a rank cannot hold one, and past a layout's last rank).

    This is for equal layers, one model chunk a rank, all of them trained. More layers never take less memory, so the
    answer is found between a count that fits and one that does not; both are priced, nothing is extrapolated.

    Raises:
        ValueError: layers differ, or a layout is interleaved.
    """
    if not job.stages_alike or np.any(layouts.virtual_pipeline > 1):
        raise ValueError("capacities need equal layers and one chunk for each rank")
    index = np.repeat(np.arange(len(layouts)), layouts.pipeline)
    rank = np.arange(len(index)) - (np.cumsum(layouts.pipeline) - layouts.pipeline)[index]
    top = job.shape.num_layers - layouts.pipeline[index] + 1
    most = _most_that_fit(
        lambda cells, count: _device_bytes(job, layouts, index[cells], rank[cells], count), top, limit_bytes
    )
    table = np.zeros((len(layouts), int(layouts.pipeline.max(initial=1))), dtype=np.int64)
    table[index, rank] = most
    return table


def _device_bytes(job: Job, layouts: LayoutColumns, index: IntColumn, rank: IntColumn, count: IntColumn) -> FloatColumn:
    """Return the device bytes of ranks with `count` equal layers."""
    none = np.zeros_like(count)
    dense, moe = (none, count) if job.shape.moe is not None and job.shape.moe.layer_pattern[0] else (count, none)
    device = np.empty(len(index))
    for start in range(0, len(index), PIECE):
        part = slice(start, start + PIECE)
        rows = _rank_columns(job, layouts, index[part], rank[part], dense[part], moe[part])
        device[part] = rank_terms(job, rows).device
    return device


def _rank_columns(
    job: Job, layouts: LayoutColumns, index: IntColumn, rank: IntColumn, dense: IntColumn, moe: IntColumn
) -> RankColumns:
    """Return ranks with other numbers of layers than their layout gives them."""
    microbatches = layouts.num_microbatches(job.workload.global_batch_size)
    rows = layouts.take(index)
    return RankColumns(
        rows, index, rank, np.maximum(microbatches[index], 1), dense.astype(np.float64), moe.astype(np.float64)
    )


def _most_that_fit(
    device_bytes: Callable[[IntColumn, IntColumn], FloatColumn], top: IntColumn, limit_bytes: float
) -> IntColumn:
    """Return for each cell the most layers, 0 to `top`, whose `device_bytes(cells, layers)` are within the limit."""
    cells = np.arange(len(top))
    least, all_ = device_bytes(cells, np.ones_like(top)), device_bytes(cells, top)
    # low fits (or is none), high does not (or is past the top)
    low = np.where(all_ <= limit_bytes, top, np.where(least <= limit_bytes, 1, 0))
    high = np.where(all_ <= limit_bytes, top + 1, np.where(least <= limit_bytes, top, 1))
    below, above = least.copy(), all_.copy()  # bytes at low and at high
    step = 0
    while True:
        cells = np.flatnonzero(high - low > 1)
        if not len(cells):
            return low
        a, b = low[cells], high[cells]
        share = (limit_bytes - below[cells]) / (above[cells] - below[cells]) if step < CHORDS else 0.5
        guess = np.clip(a + np.floor(share * (b - a)).astype(np.int64), a + 1, b - 1)
        bytes_ = device_bytes(cells, guess)
        fits = bytes_ <= limit_bytes
        low[cells], below[cells] = np.where(fits, guess, a), np.where(fits, bytes_, below[cells])
        high[cells], above[cells] = np.where(fits, b, guess), np.where(fits, above[cells], bytes_)
        step += 1


def fitting(job: Job, layout: LayoutColumns, limit_bytes: float) -> BoolColumn:
    """Whether rank r can hold layers a to b - 1 within `limit_bytes`, for one layout and layers of any kinds: the
    `fits` of `balance_kinds` (ranks x layers + 1 x layers + 1)."""
    before = np.concatenate([[0], np.cumsum(_pattern(job))])
    bounds = np.arange(len(before))
    count = np.maximum(bounds[None, :] - bounds[:, None], 0)
    mixture = np.where(count > 0, before[None, :] - before[:, None], 0)
    pairs, place = np.unique(np.stack([count.ravel(), mixture.ravel()]), axis=1, return_inverse=True)
    ranks = int(layout.pipeline[0])
    rank, pair = np.divmod(np.arange(ranks * pairs.shape[1]), pairs.shape[1])
    first = np.zeros(len(rank), dtype=np.int64)
    rows = _rank_columns(job, layout, first, rank, pairs[0][pair] - pairs[1][pair], pairs[1][pair])
    fits = (rank_terms(job, rows).device <= limit_bytes).reshape(ranks, -1)
    table: BoolColumn = fits[:, place.reshape(-1)].reshape(ranks, len(before), len(before)) & (count > 0)
    return table
