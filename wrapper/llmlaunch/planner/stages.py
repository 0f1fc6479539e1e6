"""How the layers of a model are best split over pipeline stages that need not be even.

A pipeline runs at the pace of its slowest rank (PipeDream, Narayanan et al. 2019; PHAZE, Wang et al. 2024). The first
rank has the embedding beside its layers, the last one the head and the loss. Everywhere here the best split is the one
whose slowest rank is fastest; of those, the one with the least sum of squares of its virtual stages' seconds; of those,
the lexicographically smallest, which leaves layers to late stages, where fewer micro-batches are in flight. A rank
without layers is never considered.

Seconds are those of one micro-batch, forward and backward, in any unit. Nothing here knows where they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

__all__ = ["Interleaved", "as_partitions", "balance", "interleaved", "interleaved_alike", "uneven"]

FloatColumn = NDArray[np.float64]
IntColumn = NDArray[np.int64]
BoolColumn = NDArray[np.bool_]

SAME = 1e-9  # seconds that differ by less are equal: sums of floats do not come out the same in every order
MOST_NODES = 1_000  # of the search for interleaved stages of unlike layers: milliseconds


def uneven(
    layer_seconds: FloatColumn,
    first_seconds: FloatColumn,
    last_seconds: FloatColumn,
    pipeline: IntColumn,
    layers: int,
    caps: IntColumn,
    least: IntColumn | int = 1,
) -> tuple[IntColumn, BoolColumn]:
    """The best split of `layers` alike layers over the ranks of each row's pipeline, for a million rows.

    `layer_seconds` is one layer's, `first_seconds` and `last_seconds` what the first and the last rank do beside their
    layers; `pipeline` the ranks, `caps` (rows x most ranks) how many layers each rank can hold, `least` how few it may.
    Gives the layers of each rank (rows x most ranks, 0 past a row's last rank) and whether there is a split at all.

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
    fewest = np.where(there, np.broadcast_to(np.asarray(least, dtype=np.int64), rows)[:, None], 0)
    most = np.where(there, np.clip(caps, 0, layers), 0)
    feasible: BoolColumn = np.all(most >= fewest, axis=1) & (most.sum(axis=1) >= layers)
    feasible &= fewest.sum(axis=1) <= layers
    other = np.zeros((rows, width))
    other[:, 0] = first_seconds
    other[np.arange(rows), pipeline - 1] += last_seconds
    other = np.round(other / np.asarray(layer_seconds)[:, None], 9)
    begin = np.ceil(other).astype(np.int64)

    def held(level: IntColumn) -> IntColumn:
        layers_held: IntColumn = np.minimum(np.maximum(level[:, None] - begin, fewest), most)
        return layers_held

    level = _smallest_level(held, begin.max(axis=1) + layers, layers)
    low = held(level - 1)
    open_ends = held(level) - low
    table = low + _taken(open_ends, begin - other, layers - low.sum(axis=1), pipeline)
    return np.where(feasible[:, None], table, 0), feasible


def _smallest_level(held: Callable[[IntColumn], IntColumn], high: IntColumn, layers: int) -> IntColumn:
    """The smallest whole level at which each row holds enough; `high` where no level does."""
    low = np.zeros_like(high)
    while np.any(low < high):
        middle = (low + high) // 2
        enough = held(middle).sum(axis=1) >= layers
        high = np.where(enough, middle, high)
        low = np.where(enough, low, np.minimum(middle + 1, high))
    return high


def _taken(open_ends: IntColumn, early: FloatColumn, missing: IntColumn, pipeline: IntColumn) -> IntColumn:
    """Which of the last open ends, 0 or 1 of each rank, make up for what is missing: the earliest (`early` is how much
    before the level), of equals that of the latest rank."""
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
    taken: IntColumn = inner * (later <= left[:, None])
    taken[:, 0] += take_first
    taken[rows, last_rank] += take_last
    return taken


def as_partitions(table: IntColumn, pipeline: IntColumn) -> tuple[IntColumn, tuple[tuple[int, ...], ...]]:
    """Layers of each rank (rows x most ranks, 0 past a row's last rank) as the `partition` and `partitions` of
    `LayoutColumns`; what is even after all is partition 0."""
    order = np.lexsort(table.T)  # far faster than np.unique by rows
    rows = table[order]
    new = np.ones(len(rows), dtype=np.bool_)
    new[1:] = np.any(rows[1:] != rows[:-1], axis=1)
    partitions: dict[tuple[int, ...], int] = {(): 0}
    number = []
    for row, count in zip(rows[new].tolist(), pipeline[order][new].tolist(), strict=True):
        ranks = tuple(row[:count])
        even = len(set(ranks)) <= 1
        number.append(partitions.setdefault(() if even else ranks, len(partitions)))
    index = np.empty(len(rows), dtype=np.int64)
    index[order] = np.array(number, dtype=np.int64)[np.cumsum(new) - 1]
    return index, tuple(partitions)


def balance(
    layer_seconds: Sequence[float],
    first_seconds: float,
    last_seconds: float,
    pipeline: int,
    fits: BoolColumn | None = None,
) -> tuple[int, ...] | None:
    """The best split of layers of any kinds over `pipeline` ranks, one stage each, exactly; None where there is none.

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
    """Seconds of rank r with layers a to b - 1 (ranks x layers + 1 x layers + 1), infinite where it cannot be."""
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
    """Of every rank and one past the last: the least of stage values joined, from layer a on to the last layer."""
    ranks, places, _ = stage.shape
    end = np.full(places, np.inf)
    end[-1] = 0.0
    best = [end]
    for rank in reversed(range(ranks)):
        best.insert(0, join(stage[rank], best[0][None, :]).min(axis=1))
    return tuple(best)


def interleaved_alike(
    layer_seconds: float,
    first_seconds: float,
    last_seconds: float,
    pipeline: int,
    chunks: int,
    layers: int,
    caps: Sequence[int] | None = None,
) -> tuple[int, ...] | None:
    """The best split of alike layers over `pipeline` x `chunks` virtual stages, exactly; None where there is none.

    A rank's seconds are those of all its chunks (0, then pipeline, 2 pipeline, ... further on); `caps` are the most
    layers of each rank. Every virtual stage holds a layer at least.

    Alike layers may be dealt to chunks as one likes, so the slowest rank is that of `uneven`. At that pace, limits on
    ranks and their stages are a laminar family, on which dealing one layer after the other to the stage that ends first
    is optimal for a separable convex sum (Federgruen and Groenevelt 1986).
    """
    held = np.full(pipeline, layers) if caps is None else np.asarray(caps, dtype=np.int64)
    row = np.array([float(layer_seconds)]), np.array([float(first_seconds)]), np.array([float(last_seconds)])
    table, feasible = uneven(*row, np.array([pipeline]), layers, held[None, :], least=chunks)
    if not feasible[0]:
        return None
    other = [0.0] * (pipeline * chunks)
    other[0] += round(first_seconds / layer_seconds, 9)
    other[-1] += round(last_seconds / layer_seconds, 9)
    of_rank = [sum(other[rank::pipeline]) for rank in range(pipeline)]
    slowest = max(of_rank[rank] + int(table[0, rank]) for rank in range(pipeline))
    room = [min(int(held[rank]), int(slowest - of_rank[rank] + SAME)) - chunks for rank in range(pipeline)]
    return _dealt(other, room, layers)


def _dealt(other: Sequence[float], room: list[int], layers: int) -> tuple[int, ...]:
    """Layers one after the other to the virtual stage that ends first, of equals the latest, while its rank has room
    for more than one a stage."""
    dealt = [1] * len(other)
    ends = [(seconds + 2.0, -stage) for stage, seconds in enumerate(other)]
    heapify(ends)
    for _ in range(layers - len(other)):
        while not room[-ends[0][1] % len(room)]:
            heappop(ends)
        end, stage = heappop(ends)
        dealt[-stage] += 1
        room[-stage % len(room)] -= 1
        heappush(ends, (end + 1.0, stage))
    return tuple(dealt)


@dataclass(frozen=True)
class Interleaved:
    """`proven`: no split is better. Where it is false, better ones may exist."""

    layers_by_stage: tuple[int, ...]
    proven: bool


def interleaved(
    layer_seconds: Sequence[float], first_seconds: float, last_seconds: float, pipeline: int, chunks: int
) -> Interleaved | None:
    """The best split of layers of any kinds over `pipeline` x `chunks` virtual stages; None with fewer layers.

    The split whose slowest virtual stage is fastest (`balance`) is improved by moving single layers between any two
    stages, those between them shifted along, while that helps; then branch and bound looks for a better one. It is
    exact for small models; it stops after MOST_NODES nodes with the best split it has seen.
    """
    start = balance(layer_seconds, first_seconds, last_seconds, pipeline * chunks)
    if start is None:
        return None
    other = np.zeros(pipeline * chunks)
    other[0] += first_seconds
    other[-1] += last_seconds
    before = np.concatenate([[0.0], np.cumsum(layer_seconds)])
    return _Bounded(before, other, pipeline, _improved(before, other, pipeline, start)).search()


def _improved(before: FloatColumn, other: FloatColumn, pipeline: int, split: tuple[int, ...]) -> tuple[int, ...]:
    """No layer moved to another stage makes the split better. `before` are the seconds of all layers before each one
    and of all, `other` those beside the layers of each stage."""
    count = len(split)
    moves = (np.eye(count, dtype=np.int64)[None, :, :] - np.eye(count, dtype=np.int64)[:, None, :]).reshape(-1, count)
    best = np.array(split)
    while True:
        splits = np.concatenate([best[None, :], (best + moves)[np.all(best + moves > 0, axis=1)]])
        slowest, squares = _judged(before, other, pipeline, splits)
        fastest = np.flatnonzero(slowest <= slowest.min() * (1 + SAME))
        place = fastest[squares[fastest].argmin()]
        evener = squares[place] < squares[0] * (1 - SAME)
        if slowest[0] <= slowest[place] * (1 + SAME) and not evener:
            return tuple(best.tolist())
        best = splits[place]


def _judged(
    before: FloatColumn, other: FloatColumn, pipeline: int, splits: IntColumn
) -> tuple[FloatColumn, FloatColumn]:
    """Seconds of the slowest rank and squares of the stages' seconds of each split."""
    ends = np.cumsum(splits, axis=1)
    seconds = other + before[ends] - before[ends - splits]
    ranks = seconds.reshape(len(splits), -1, pipeline).sum(axis=1)
    return ranks.max(axis=1), np.square(seconds).sum(axis=1)


class _Bounded:
    """The state of one branch and bound: stages are filled in the order of the model.

    A partial split is given up once its slowest rank, or the mean of all ranks with what is left, is slower than the
    best split's; or, at the same pace, once its squares with what is left in equal stages add up to more.
    """

    def __init__(self, before: FloatColumn, other: FloatColumn, pipeline: int, start: tuple[int, ...]) -> None:
        self.before, self.other, self.pipeline = before.tolist(), other.tolist(), pipeline
        self.layers, self.stages = len(before) - 1, len(other)
        self.other_after = [sum(self.other[stage:]) for stage in range(self.stages + 1)]
        self.nodes = 0
        self.best = start
        slowest, squares = _judged(before, other, pipeline, np.array([start]))
        self.slowest, self.squares = float(slowest[0]), float(squares[0])

    def search(self) -> Interleaved:
        self._fill([], 0, [0.0] * self.pipeline, 0.0)
        return Interleaved(self.best, self.nodes <= MOST_NODES)

    def _fill(self, split: list[int], place: int, ranks: list[float], squares: float) -> None:
        stage = len(split)
        self.nodes += 1
        if self.nodes > MOST_NODES or not self._worth(stage, place, ranks, squares):
            return
        if stage == self.stages:
            self._keep(tuple(split), max(ranks), squares)
            return
        rank, left = stage % self.pipeline, self.stages - stage - 1
        first_stop = place + 1 if left else self.layers
        for stop in range(first_stop, self.layers - left + 1):
            seconds = self.other[stage] + self.before[stop] - self.before[place]
            if ranks[rank] + seconds > self.slowest * (1 + SAME):
                break
            fuller = [*ranks[:rank], ranks[rank] + seconds, *ranks[rank + 1 :]]
            self._fill([*split, stop - place], stop, fuller, squares + seconds**2)

    def _worth(self, stage: int, place: int, ranks: list[float], squares: float) -> bool:
        left = self.before[-1] - self.before[place] + self.other_after[stage]
        slowest = max(max(ranks), (sum(ranks) + left) / self.pipeline)
        if slowest > self.slowest * (1 + SAME):
            return False
        least = squares + (left**2 / (self.stages - stage) if stage < self.stages else 0.0)
        same_pace = slowest >= self.slowest * (1 - SAME)
        return not (same_pace and least > self.squares * (1 + SAME))

    def _keep(self, split: tuple[int, ...], slowest: float, squares: float) -> None:
        faster = slowest < self.slowest * (1 - SAME)
        evener = squares < self.squares * (1 - SAME)
        if faster or evener or (squares <= self.squares * (1 + SAME) and split < self.best):
            self.best, self.slowest, self.squares = split, slowest, squares
