"""How the layers of a model are best split over pipeline stages that need not be even: the best balance for many splits
at once, and the best balance that memory allows.

A pipeline runs at the pace of its slowest rank (PipeDream, Narayanan et al. 2019; PHAZE, Wang et al. 2024). The first
rank has the embedding beside its layers, the last one the head and the loss. Everywhere here the best split is the one
whose slowest rank is fastest; of those, the one with the least sum of squares of its ranks' seconds; of those, the
lexicographically smallest, which leaves layers to late stages, where fewer micro-batches are in flight. A rank without
layers is never considered. Seconds are those of one micro-batch, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from llmlaunch.cluster.profile import Cluster
from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn
from llmlaunch.frozen import frozen
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.peak import rank_terms
from llmlaunch.timing.stages import last_seconds, stage_seconds

__all__ = ["balance_alike", "balance_kinds", "balanced", "balanced_within", "capacities", "costs_of", "fitting"]


SAME = 1e-9  # seconds that differ by less are equal: sums of floats do not come out the same in every order


def balance_alike(
    layer_seconds: FloatColumn,
    first_seconds: FloatColumn,
    last_seconds: FloatColumn,
    pipeline: IntColumn,
    layers: int,
    caps: IntColumn,
) -> tuple[IntColumn, BoolColumn]:
    """Return the best split of `layers` equal layers over the ranks of each row's pipeline, for a million rows.

    `layer_seconds` is one layer's, `first_seconds` and `last_seconds` what the first and the last rank do beside their
    layers; `pipeline` the ranks, `caps` (rows x most ranks) how many layers each rank can hold; it holds one at least.
    The result is the layers of each rank (rows x most ranks, 0 past a row's last rank) and whether there is a split.

    In units of a layer, the k-th layer of rank r ends its work at x_r + k, with x_r = its other work. A split takes the
    first layers of every rank, so its slowest rank is the largest end it takes, and its sum of squares the sum of
    2 (x_r + k) - 1 over what it takes, plus a constant: taking the smallest ends is best for both, as swapping any
    other choice for them shows, and caps only strike ends off the list. Ends up to an integer K are counted in closed
    form; the smallest K that holds enough is found by bisection, and of the last ends, at most one a rank, only those
    of the first and the last rank are not whole.
    """
    pipeline = np.asarray(pipeline, dtype=np.int64)
    rows, width = caps.shape
    there = np.arange(width) < pipeline[:, None]
    fewest = there.astype(np.int64)
    most = np.where(there, np.clip(caps, 0, layers), 0)
    feasible: BoolColumn = np.all(most >= fewest, axis=1) & (most.sum(axis=1) >= layers)
    feasible &= fewest.sum(axis=1) <= layers
    other = np.zeros((rows, width))
    other[:, 0] = first_seconds
    other[np.arange(rows), pipeline - 1] += last_seconds
    other = np.round(other / np.asarray(layer_seconds)[:, None], 9)
    begin = np.ceil(other).astype(np.int64)

    def layers_at(level: IntColumn) -> IntColumn:
        count: IntColumn = np.minimum(np.maximum(level[:, None] - begin, fewest), most)
        return count

    level = _smallest_level(layers_at, begin.max(axis=1) + layers, layers)
    low = layers_at(level - 1)
    open_ends = layers_at(level) - low
    table = low + _open_ends_used(open_ends, begin - other, layers - low.sum(axis=1), pipeline)
    return np.where(feasible[:, None], table, 0), feasible


def _smallest_level(layers_at: Callable[[IntColumn], IntColumn], high: IntColumn, layers: int) -> IntColumn:
    """Return the smallest whole level at which each row holds enough layers; `high` where no level does."""
    low = np.zeros_like(high)
    while np.any(low < high):
        middle = (low + high) // 2
        enough = layers_at(middle).sum(axis=1) >= layers
        high = np.where(enough, middle, high)
        low = np.where(enough, low, np.minimum(middle + 1, high))
    return high


def _open_ends_used(open_ends: IntColumn, early: FloatColumn, missing: IntColumn, pipeline: IntColumn) -> IntColumn:
    """Return which of the last open ends, 0 or 1 of each rank, supply the missing layers: the earliest (`early` is how
    much before the level), of equals that of the latest rank."""
    rows = np.arange(len(pipeline))
    last_rank = pipeline - 1
    last, first = open_ends[rows, last_rank], np.where(pipeline > 1, open_ends[:, 0], 0)
    inner = open_ends.copy()
    inner[:, 0] = 0
    inner[rows, last_rank] = 0
    early_first, early_last = early[:, 0], early[rows, last_rank]
    before_last = first * (early_first > early_last)
    before_first = np.where(early_first > 0, last * (early_last >= early_first), last + inner.sum(axis=1))
    take_last = last * (missing > before_last)
    take_first = first * (missing > before_first)
    left = missing - take_last - take_first
    later = np.cumsum(inner[:, ::-1], axis=1)[:, ::-1]  # open ends of this rank and those after it
    used: IntColumn = inner * (later <= left[:, None])
    used[:, 0] += take_first
    used[rows, last_rank] += take_last
    return used


def balance_kinds(
    layer_seconds: Sequence[float],
    first_seconds: float,
    last_seconds: float,
    pipeline: int,
    fits: BoolColumn | None = None,
) -> tuple[int, ...] | None:
    """Return the best split of layers of any kinds over `pipeline` ranks, one stage each, exactly; None without one.

    `fits[r, a, b]` says whether rank r can hold layers a to b - 1 (ranks x layers + 1 x layers + 1); absent, all can.

    Two dynamic programmes over (rank, first layer), as in PHAZE's over layer sets: the best end of a stage that starts
    at layer a is found by trying all, and what follows does not depend on what went before. The first finds the pace of
    the slowest rank, the second the least sum of squares among stages no slower than that. O(ranks x layers^2).
    """
    seconds = _stage_seconds(layer_seconds, first_seconds, last_seconds, pipeline, fits)
    slowest = _best_to_the_end(seconds, np.maximum)[0][0]
    if not np.isfinite(slowest):
        return None
    squares = np.where(seconds <= slowest * (1 + SAME), seconds, np.inf) ** 2
    rest = _best_to_the_end(squares, np.add)
    start, stages = 0, []
    for rank in range(pipeline):
        good = squares[rank, start] + rest[rank + 1] <= rest[rank][start] * (1 + SAME)
        stop = int(np.argmax(good))  # the smallest
        stages.append(stop - start)
        start = stop
    return tuple(stages)


def _stage_seconds(
    layer_seconds: Sequence[float], first: float, last: float, pipeline: int, fits: BoolColumn | None
) -> FloatColumn:
    """Return the seconds of rank r with layers a to b - 1 (ranks x layers + 1 x layers + 1), infinite where
    impossible."""
    before = np.concatenate([[0.0], np.cumsum(layer_seconds)])
    other = np.zeros(pipeline)
    other[0] += first
    other[-1] += last
    seconds = other[:, None, None] + (before[None, :] - before[:, None])
    some = np.arange(len(before))[None, :] > np.arange(len(before))[:, None]
    return np.where(some if fits is None else some & fits, seconds, np.inf)


def _best_to_the_end(
    stage: FloatColumn, join: Callable[[FloatColumn, FloatColumn], FloatColumn]
) -> tuple[FloatColumn, ...]:
    """Return for every rank, and one past the last, the least joined stage values from layer a to the last layer."""
    ranks, places, _ = stage.shape
    end = np.full(places, np.inf)
    end[-1] = 0.0
    best = [end]
    for rank in reversed(range(ranks)):
        best.insert(0, join(stage[rank], best[0][None, :]).min(axis=1))
    return tuple(best)


Split = tuple[int, ...]

PIECE = 8192  # ranks priced at a time, so that the columns of the formula stay in the processor's cache
CHORDS = 3  # interpolations before plain bisection: bytes are nearly affine in the layers


@frozen
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
    for value in sorted(set(code.tolist())):
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
