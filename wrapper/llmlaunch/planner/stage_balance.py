"""How layers are best split over pipeline stages, as arithmetic: layers take seconds, and ranks hold so many.

A pipeline runs at the pace of its slowest rank (PipeDream, Narayanan et al. 2019; PHAZE, Wang et al. 2024). The first
rank has the embedding beside its layers, the last one the head and the loss. Everywhere here the best split is the one
whose slowest rank is fastest; of those, the one with the least sum of squares of its ranks' seconds; of those, the
lexicographically smallest, which leaves layers to late stages, where fewer micro-batches are in flight. A rank without
layers is never considered. Seconds are those of one micro-batch, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn
from llmlaunch.frozen import frozen
from llmlaunch.memory.job import Job, layer_kinds

SAME = 1e-9  # seconds that differ by less are equal: sums of floats do not come out the same in every order
MOST_LEADING = 4  # dense layers before mixtures; each one more doubles the ways to share them out


@frozen
class Costs:
    """Seconds of one micro-batch, forward and backward: of a layer that is no mixture and of a mixture, each in the
    mean of the model's layers where these are of several kinds (`kinds`, of a layer of each); of what the first and the
    last stage with layers do beside their layers, and of the loss where it has a stage without layers (`loss`, else
    0)."""

    dense: FloatColumn
    mixture: FloatColumn
    first: FloatColumn
    last: FloatColumn
    loss: FloatColumn
    kinds: tuple[FloatColumn, ...] = ()

    def take(self, index: IntColumn) -> Costs:
        dense, mixture, first, last, loss = (
            column[index] for column in (self.dense, self.mixture, self.first, self.last, self.loss)
        )
        return Costs(dense, mixture, first, last, loss, tuple(column[index] for column in self.kinds))


def leading_dense_layers(job: Job) -> int:
    """Return how many layers are dense if these are few, come first, and all layers are trained; else 0."""
    kinds = list(layer_kinds(job.shape))
    dense = kinds.count(0)
    few = 0 < dense < len(kinds) and dense <= MOST_LEADING and all(kinds[dense:])
    return dense if few and job.techniques.trained_layers is None else 0


def empty_stages(job: Job) -> int:
    """Return how many stages hold no layers: that of the loss, where prediction heads lie on the one before it."""
    return int(job.techniques.heads_before_loss)


def balance_alike(
    layer_seconds: FloatColumn,
    first_seconds: FloatColumn,
    last_seconds: FloatColumn,
    pipeline: IntColumn,
    layers: int,
    caps: IntColumn,
    fewest_first: int = 1,
) -> tuple[IntColumn, BoolColumn]:
    """Return the best split of `layers` equal layers over the ranks of each row's pipeline, for a million rows.

    `layer_seconds` is one layer's, `first_seconds` and `last_seconds` what the first and the last rank do beside their
    layers; `pipeline` the ranks, `caps` (rows x most ranks) how many layers each rank can hold; it holds one at
    least, and the first rank `fewest_first`.
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
    fewest[:, 0] = fewest_first
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
    early = np.round(begin - other, 9)  # ends at the same time are equal
    table = low + _open_ends_used(open_ends, early, layers - low.sum(axis=1), pipeline)
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
