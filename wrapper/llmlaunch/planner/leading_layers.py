"""Pipeline stages of models whose first few layers are dense and all others mixtures, such as DeepSeek-V3: the best
balance for many layouts at once, and the best balance that memory allows.

The dense layers can be shared out over the first ranks in few ways. For each of them the mixtures are equal layers over
the remaining ranks, which `balance_alike` splits in closed form; the best way decides. The answers are those of
`balance_kinds`, whose dynamic programme takes a thousand times as long.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn
from llmlaunch.frozen import frozen
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.job import Job
from llmlaunch.planner.stage_balance import SAME, Costs, balance_alike, leading_dense_layers
from llmlaunch.planner.stage_capacities import most_that_fit, rank_device_bytes


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
