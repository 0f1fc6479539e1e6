"""How many layers each pipeline rank can hold under a memory limit, asked of the estimator itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.terms import rank_terms

__all__ = ["capacities", "fitting"]

PIECE = 8192  # ranks priced at a time, so that the columns of the formula stay in the processor's cache
CHORDS = 3  # interpolations before plain bisection: bytes are nearly affine in the layers


def capacities(job: Job, layouts: LayoutColumns, limit_bytes: float) -> IntColumn:
    """The most layers each rank of every layout can hold within `limit_bytes` of device memory, if the other ranks
    hold at least one each (rows x most ranks; 0 where a rank cannot hold one, and past a layout's last rank).

    For layers that are all alike, one model chunk a rank, all of them trained. More layers never take less memory, so
    the answer is found between a count that fits and one that does not; both are priced, nothing is extrapolated.

    Raises:
        ValueError: layers are not alike, or a layout is interleaved.
    """
    if not job.stages_alike or np.any(layouts.virtual_pipeline > 1):
        raise ValueError("capacities are of alike layers and one chunk for each rank")
    index, rank = _cells(layouts)
    top = job.shape.num_layers - layouts.pipeline[index] + 1
    held = _most_that_fit(
        lambda cells, count: _device(job, layouts, index[cells], rank[cells], count), top, limit_bytes
    )
    table = np.zeros((len(layouts), int(layouts.pipeline.max(initial=1))), dtype=np.int64)
    table[index, rank] = held
    return table


def fitting(job: Job, layout: LayoutColumns, limit_bytes: float) -> NDArray[np.bool_]:
    """Whether rank r can hold layers a to b - 1 within `limit_bytes`, for one layout and layers of any kinds: the
    `fits` of `stages.balance` (ranks x layers + 1 x layers + 1)."""
    pattern = job.shape.moe.layer_pattern if job.shape.moe else (0,) * job.shape.num_layers
    before = np.concatenate([[0], np.cumsum(pattern)])
    places = np.arange(len(before))
    count = np.maximum(places[None, :] - places[:, None], 0)
    mixture = np.where(count > 0, before[None, :] - before[:, None], 0)
    pairs, place = np.unique(np.stack([count.ravel(), mixture.ravel()]), axis=1, return_inverse=True)
    ranks = int(layout.pipeline[0])
    rank, pair = np.divmod(np.arange(ranks * pairs.shape[1]), pairs.shape[1])
    first = np.zeros(len(rank), dtype=np.int64)
    rows = _rank_columns(job, layout, first, rank, pairs[0][pair] - pairs[1][pair], pairs[1][pair])
    fits = (rank_terms(job, rows).device <= limit_bytes).reshape(ranks, -1)
    table: NDArray[np.bool_] = fits[:, place.reshape(-1)].reshape(ranks, len(before), len(before)) & (count > 0)
    return table


def _cells(layouts: LayoutColumns) -> tuple[IntColumn, IntColumn]:
    """Every (layout, rank)."""
    repeat = layouts.pipeline
    index = np.repeat(np.arange(len(layouts)), repeat)
    return index, np.arange(len(index)) - (np.cumsum(repeat) - repeat)[index]


def _device(job: Job, layouts: LayoutColumns, index: IntColumn, rank: IntColumn, count: IntColumn) -> FloatColumn:
    """Device bytes of ranks with so many alike layers."""
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
    """Ranks with layers other than those their layout gives them."""
    microbatches = layouts.num_microbatches(job.workload.global_batch_size)
    rows = layouts.take(index)
    return RankColumns(
        rows, index, rank, np.maximum(microbatches[index], 1), dense.astype(np.float64), moe.astype(np.float64)
    )


def _most_that_fit(
    device: Callable[[IntColumn, IntColumn], FloatColumn], top: IntColumn, limit_bytes: float
) -> IntColumn:
    """For each cell the most layers, 0 to `top`, whose `device(cells, layers)` bytes are within the limit."""
    cells = np.arange(len(top))
    one, all_ = device(cells, np.ones_like(top)), device(cells, top)
    # low fits (or is none), high does not (or is past the top)
    low = np.where(all_ <= limit_bytes, top, np.where(one <= limit_bytes, 1, 0))
    high = np.where(all_ <= limit_bytes, top + 1, np.where(one <= limit_bytes, top, 1))
    below, above = one.copy(), all_.copy()  # bytes at low and at high
    step = 0
    while True:
        cells = np.flatnonzero(high - low > 1)
        if not len(cells):
            return low
        a, b = low[cells], high[cells]
        share = (limit_bytes - below[cells]) / (above[cells] - below[cells]) if step < CHORDS else 0.5
        guess = np.clip(a + np.floor(share * (b - a)).astype(np.int64), a + 1, b - 1)
        bytes_ = device(cells, guess)
        fits = bytes_ <= limit_bytes
        low[cells], below[cells] = np.where(fits, guess, a), np.where(fits, bytes_, below[cells])
        high[cells], above[cells] = np.where(fits, b, guess), np.where(fits, above[cells], bytes_)
        step += 1
