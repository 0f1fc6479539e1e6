"""How many layers each pipeline rank can hold within a limit of device memory, asked of the memory formula."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.candidates import stages_alike
from llmlaunch.memory.job import Job, RankColumns, layer_kinds, of_classes
from llmlaunch.memory.peak import device_bytes, rank_sums
from llmlaunch.planner.stage_balance import empty_stages

PIECE = 8192  # ranks priced at a time, so that the columns of the formula stay in the processor's cache
SAMPLED = 8  # ranks asked first, of pipelines with several times as many
CHORDS = 3  # interpolations before plain bisection: bytes are nearly affine in the layers


def capacities(job: Job, layouts: LayoutColumns, limit_bytes: float, most_layers: IntColumn | None = None) -> IntColumn:
    """Return the most layers each rank of every layout can hold within `limit_bytes` of device memory, if the other
    ranks hold at least one each (rows x most ranks; 0 where a rank cannot hold one, and past a layout's last rank); no
    more than `most_layers` of each layout are looked for.

    This is for equal layers, one model chunk a rank, all of them trained. More layers never take less memory, so the
    answer is found between a count that fits and one that does not; both are priced, nothing is extrapolated.

    Raises:
        ValueError: layers differ, or a layout is interleaved.
    """
    if not stages_alike(job) or np.any(layouts.virtual_pipeline > 1):
        raise ValueError("capacities need equal layers and one chunk for each rank")
    index = np.repeat(np.arange(len(layouts)), layouts.pipeline)
    rank = np.arange(len(index)) - (np.cumsum(layouts.pipeline) - layouts.pipeline)[index]
    table = np.zeros((len(layouts), int(layouts.pipeline.max(initial=1))), dtype=np.int64)
    table[index, rank] = _capacities_of(job, layouts, index, rank, limit_bytes, most_layers)
    return table


def may_hold_all(
    job: Job, layouts: LayoutColumns, limit_bytes: float, most_layers: IntColumn | None = None
) -> IntColumn:
    """Return the row numbers of layouts whose ranks may hold all layers together, by the `capacities` of a few ranks of
    long pipelines: of those between the first and the last, a later one keeps fewer micro-batches and holds no less."""
    inner = layouts.pipeline - 2
    long = np.flatnonzero(inner >= 4 * SAMPLED)
    if not len(long):
        return np.arange(len(layouts))
    ends = (1 + np.arange(SAMPLED)) * inner[long][:, None] // SAMPLED  # the last rank of each piece
    rank = np.concatenate([0 * ends[:, :1], ends, ends[:, -1:] + 1], axis=1)
    index = np.repeat(long, rank.shape[1])
    each = _capacities_of(job, layouts, index, rank.ravel(), limit_bytes, most_layers).reshape(rank.shape)
    enough = (each * np.diff(rank, axis=1, prepend=-1)).sum(axis=1) >= job.shape.num_layers
    rows: IntColumn = np.delete(np.arange(len(layouts)), long[~enough | (each == 0).any(axis=1)])
    return rows


def _capacities_of(
    job: Job,
    layouts: LayoutColumns,
    index: IntColumn,
    rank: IntColumn,
    limit_bytes: float,
    most_layers: IntColumn | None,
) -> IntColumn:
    """Return the capacities of some ranks; `index` is the layout of each."""
    top = job.shape.num_layers - (layouts.pipeline[index] - empty_stages(job)) + 1
    if most_layers is not None:
        top = np.clip(most_layers[index], 1, top)
    mixture = job.shape.moe is not None and bool(job.shape.moe.layer_pattern[0])

    def bytes_of(cells: IntColumn, count: IntColumn) -> FloatColumn:
        dense, moe = (0 * count, count) if mixture else (count, 0 * count)
        return rank_device_bytes(job, layouts, index[cells], rank[cells], dense, moe)

    return most_that_fit(bytes_of, top, limit_bytes)


def rank_device_bytes(
    job: Job, layouts: LayoutColumns, index: IntColumn, rank: IntColumn, dense: IntColumn, moe: IntColumn
) -> FloatColumn:
    """Return the device bytes of ranks with so many layers of each kind; `index` is the layout of each."""
    device = np.empty(len(index))
    for start in range(0, len(index), PIECE):
        part = slice(start, start + PIECE)
        rows = _rank_columns(job, layouts, index[part], rank[part], dense[part], moe[part])
        device[part] = device_bytes(*rank_sums(job, rows))
    return device


def _rank_columns(
    job: Job, layouts: LayoutColumns, index: IntColumn, rank: IntColumn, dense: IntColumn, moe: IntColumn
) -> RankColumns:
    """Return ranks with other numbers of layers than their layout gives them."""
    microbatches = np.maximum(layouts.num_microbatches(job.workload.global_batch_size), 1)
    return of_classes(job, layouts.take(index), rank, microbatches[index], dense, moe)


def most_that_fit(
    bytes_of: Callable[[IntColumn, IntColumn], FloatColumn], top: IntColumn, limit_bytes: float
) -> IntColumn:
    """Return for each cell the most layers, 0 to `top`, whose `bytes_of(cells, layers)` are within the limit. A guess
    and the next count are asked together: a call costs more than its cells, and these two mostly decide."""
    least, all_ = np.split(bytes_of(np.tile(np.arange(len(top)), 2), np.concatenate([np.ones_like(top), top])), 2)
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
        counts = guess, np.minimum(guess + 1, b - 1)
        for count, bytes_ in zip(counts, np.split(bytes_of(np.tile(cells, 2), np.concatenate(counts)), 2), strict=True):
            inside = count < high[cells]  # the next count is not, where the guess does not fit
            fits, over = inside & (bytes_ <= limit_bytes), inside & (bytes_ > limit_bytes)
            low[cells], below[cells] = np.where(fits, count, low[cells]), np.where(fits, bytes_, below[cells])
            high[cells], above[cells] = np.where(over, count, high[cells]), np.where(over, bytes_, above[cells])
        step += 1


def fitting(job: Job, layout: LayoutColumns, limit_bytes: float) -> BoolColumn:
    """Whether rank r can hold layers a to b - 1 within `limit_bytes`, for one layout and layers of any kinds: the
    `fits` of `balance_kinds` (ranks x layers + 1 x layers + 1)."""
    before = np.concatenate([[0], np.cumsum(layer_kinds(job.shape))])
    bounds = np.arange(len(before))
    count = np.maximum(bounds[None, :] - bounds[:, None], 0)
    mixture = np.where(count > 0, before[None, :] - before[:, None], 0)
    pairs, place = np.unique(np.stack([count.ravel(), mixture.ravel()]), axis=1, return_inverse=True)
    ranks = int(layout.pipeline[0])
    rank, pair = np.divmod(np.arange(ranks * pairs.shape[1]), pairs.shape[1])
    first = np.zeros(len(rank), dtype=np.int64)
    rows = _rank_columns(job, layout, first, rank, pairs[0][pair] - pairs[1][pair], pairs[1][pair])
    fits = (device_bytes(*rank_sums(job, rows)) <= limit_bytes).reshape(ranks, -1)
    table: BoolColumn = fits[:, place.reshape(-1)].reshape(ranks, len(before), len(before)) & (count > 0)
    return table
