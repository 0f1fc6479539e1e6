"""How many layers each pipeline rank can hold within a limit of device memory, asked of the memory formula; and stages
of models whose first few layers are dense and all others mixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn
from llmlaunch.frozen import frozen
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.estimator import stages_alike
from llmlaunch.memory.job import Job, RankColumns, layer_kinds, of_classes
from llmlaunch.memory.peak import device_bytes, rank_sums
from llmlaunch.planner.stage_balance import SAME, Costs, balance_alike, empty_stages, leading_dense_layers

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


@frozen
class MixtureCapacities:
    """The most mixtures that each rank can hold: `beside_none[row, rank]` without dense layers, and
    `beside[dense][row, rank]` beside so many; -1 where a rank cannot even hold those."""

    beside_none: IntColumn
    beside: dict[int, IntColumn]


def may_hold_mixtures(job: Job, layouts: LayoutColumns, limit_bytes: float) -> IntColumn:
    """Return the row numbers of layouts of which some rank may hold a share of the mixtures that one of them must. Of
    the ranks before the last, a later one keeps fewer micro-batches and holds no less, so two ranks answer for all."""
    mixtures = job.shape.num_layers - leading_dense_layers(job)
    share = np.repeat(-(-mixtures // layouts.pipeline), 2)
    index = np.repeat(np.arange(len(layouts)), 2)
    rank = np.maximum(layouts.pipeline[index] - 1 - np.arange(len(index)) % 2, 0)
    needed = rank_device_bytes(job, layouts, index, rank, 0 * share, share).reshape(-1, 2)
    return np.flatnonzero(needed.min(axis=1) <= limit_bytes)


def mixture_capacities(
    job: Job, layouts: LayoutColumns, limit_bytes: float, most_layers: IntColumn | None = None
) -> MixtureCapacities:
    """Return the capacities of all ranks of layouts with one chunk to a rank, within `limit_bytes` of the device, or no
    more than `most_layers` of each layout. More layers never take less memory."""
    dense = leading_dense_layers(job)
    index = np.repeat(np.arange(len(layouts)), layouts.pipeline)
    rank = np.arange(len(index)) - (np.cumsum(layouts.pipeline) - layouts.pipeline)[index]
    first = [np.flatnonzero(rank < dense - beside + 1) for beside in range(1, dense + 1)]
    cells = [np.arange(len(index)), *first]
    beside = np.repeat(np.arange(dense + 1), [len(some) for some in cells])
    place = np.concatenate(cells)
    shift = (beside > 0).astype(np.int64)  # beside dense layers there may be none

    def bytes_of(which: IntColumn, count: IntColumn) -> FloatColumn:
        at = place[which]
        return rank_device_bytes(job, layouts, index[at], rank[at], beside[which], count - shift[which])

    top = np.full(len(layouts), job.shape.num_layers - dense)
    if most_layers is not None:
        top = np.clip(most_layers, 1, top)
    top = top[index[place]] + shift
    most = most_that_fit(bytes_of, top, limit_bytes) - shift
    tables = [np.full((len(layouts), int(layouts.pipeline.max(initial=1))), -1) for _ in range(dense + 1)]
    for count, table in enumerate(tables):
        mine = beside == count
        table[index[place[mine]], rank[place[mine]]] = most[mine]
    return MixtureCapacities(tables[0], dict(enumerate(tables[1:], start=1)))


def balance_leading(
    costs: Costs, pipeline: IntColumn, layers: tuple[int, int], most: MixtureCapacities | None = None
) -> tuple[IntColumn, BoolColumn]:
    """Return the best split of `layers` (dense layers first, then mixtures) over the ranks of each row's pipeline: the
    layers of each rank (rows x most ranks, 0 past a row's last), and whether there is a split.

    The best split is the one whose slowest rank is fastest; of those the one with the least sum of squares, and of
    those the lexicographically smallest.
    """
    rows, width = len(pipeline), int(pipeline.max(initial=1))
    best = np.zeros((rows, width), dtype=np.int64)
    slowest, squares = np.full(rows, np.inf), np.full(rows, np.inf)
    for shares in _shares(layers[0]):
        some = np.flatnonzero(pipeline >= len(shares))
        if not len(some):
            continue
        caps, holds = _limits(most, some, shares, width, layers[1])
        table, seconds, feasible = _with_shares(shares, layers[1], costs.take(some), pipeline[some], caps)
        feasible &= holds
        pace = np.where(feasible, seconds.max(axis=1), np.inf)
        square = np.where(feasible, (seconds**2).sum(axis=1), np.inf)
        better = _better(pace, square, table, slowest[some], squares[some], best[some]) & feasible
        won = some[better]
        best[won], slowest[won], squares[won] = table[better], pace[better], square[better]
    return best, np.isfinite(slowest)


def _limits(
    most: MixtureCapacities | None, rows: IntColumn, shares: tuple[int, ...], width: int, mixtures: int
) -> tuple[IntColumn, BoolColumn]:
    """Return the most mixtures of the last rank of `shares` and those after it, and whether each rank can hold its
    dense layers."""
    edge = len(shares) - 1
    if most is None:
        return np.full((len(rows), width - edge), mixtures), np.ones(len(rows), dtype=np.bool_)
    beside = [most.beside[dense][rows, rank] for rank, dense in enumerate(shares)]
    caps: IntColumn = np.column_stack([beside[-1], most.beside_none[rows, edge + 1 : width]])
    return caps, np.min(beside, axis=0) >= 0


def _shares(dense: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to share dense layers out over the first ranks, at least one each."""
    if not dense:
        yield ()
    for first in range(1, dense + 1):
        for rest in _shares(dense - first):
            yield (first, *rest)


def _better(
    pace: FloatColumn,
    square: FloatColumn,
    table: IntColumn,
    best_pace: FloatColumn,
    best_square: FloatColumn,
    best: IntColumn,
) -> BoolColumn:
    """Whether each new split is better than the best so far: faster, then of less squares, then smaller."""
    with np.errstate(invalid="ignore"):
        faster, as_fast = pace < best_pace * (1 - SAME), pace <= best_pace * (1 + SAME)
        less, as_much = square < best_square * (1 - SAME), square <= best_square * (1 + SAME)
    differs = table != best
    at = np.argmax(differs, axis=1)
    rows = np.arange(len(table))
    smaller = differs.any(axis=1) & (table[rows, at] < best[rows, at])
    better: BoolColumn = faster | (as_fast & (less | (as_much & smaller)))
    return better


def _with_shares(
    shares: tuple[int, ...], mixtures: int, costs: Costs, pipeline: IntColumn, caps: IntColumn
) -> tuple[IntColumn, FloatColumn, BoolColumn]:
    """Return for dense layers shared out as `shares` the best layers by rank, the seconds of the ranks, and whether
    there is such a split. The last rank of `shares` and those after it hold up to `caps` mixtures."""
    edge, rows = len(shares) - 1, np.arange(len(pipeline))
    offset = shares[-1] * costs.dense + (costs.first if edge == 0 else 0.0)
    part, feasible = balance_alike(costs.mixture, offset, costs.last, pipeline - edge, mixtures, caps, fewest_first=0)
    table = np.column_stack([np.tile(np.array(shares[:-1], dtype=np.int64), (len(rows), 1)), part])
    width = table.shape[1]
    dense = np.zeros(width)
    dense[: len(shares)] = shares
    table[:, edge] += shares[-1]
    seconds = dense * costs.dense[:, None] + (table - dense) * costs.mixture[:, None]
    seconds[:, 0] += costs.first
    seconds[rows, pipeline - 1] += costs.last
    return table, np.where(np.arange(width) < pipeline[:, None], seconds, 0.0), feasible
