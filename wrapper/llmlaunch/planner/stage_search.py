"""Layers by stage for many splits at once: the best whatever memory says, and the best that memory allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llmlaunch.cluster.profile import Cluster
from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.job import Job
from llmlaunch.planner.capacity import capacities, fitting
from llmlaunch.planner.stages import balance, uneven
from llmlaunch.timing.stages import last_seconds, stage_seconds

__all__ = ["Costs", "balanced", "balanced_within", "costs_of"]

Split = tuple[int, ...]


@dataclass(frozen=True)
class Costs:
    """Seconds of one micro-batch, forward and backward: of a layer of each kind, and what the ends do beside layers."""

    dense: FloatColumn
    mixture: FloatColumn
    first: FloatColumn
    last: FloatColumn

    def take(self, index: IntColumn) -> Costs:
        """Some of the rows."""
        return Costs(self.dense[index], self.mixture[index], self.first[index], self.last[index])


def costs_of(job: Job, cluster: Cluster, layouts: LayoutColumns) -> Costs:
    """What stages are made of, for every layout."""
    found = stage_seconds(job, cluster, layouts)
    return Costs(found.dense_layer, found.mixture_layer, found.first, last_seconds(job, found))


def balanced(job: Job, layouts: LayoutColumns, costs: Costs) -> LayoutColumns:
    """Each layout with the layers by stage that balance best; partition 0 where those are even."""
    found: list[Split] = [()] * len(layouts)
    for rows, splits in _by_shape(job, layouts, costs):
        for row, split in zip(rows.tolist(), splits, strict=True):
            found[row] = split
    return _with_splits(layouts, found)


def balanced_within(
    job: Job, layouts: LayoutColumns, costs: Costs, limit_bytes: float
) -> tuple[IntColumn, LayoutColumns]:
    """(rows, those with the layers by stage that balance best while every rank stays within the limit). Rows without
    such stages are left out, and so are those with several chunks to a rank, whose memory is judged afterwards."""
    rows = np.flatnonzero(layouts.virtual_pipeline == 1)
    chosen, cost = layouts.take(rows), costs.take(rows)
    if not len(rows):
        return rows, chosen
    if job.stages_alike:
        splits = _of_ranks(job, chosen, cost, capacities(job, chosen, limit_bytes))
    else:
        each = (chosen.take(np.array([row])) for row in range(len(rows)))
        splits = [_of_kinds(job, one, cost, row, fitting(job, one, limit_bytes)) for row, one in enumerate(each)]
    kept = np.flatnonzero([len(split) > 0 for split in splits])
    return rows[kept], _with_splits(chosen.take(kept), [splits[row] for row in kept])


def _pattern(job: Job) -> Sequence[int]:
    return job.shape.moe.layer_pattern if job.shape.moe else (0,) * job.shape.num_layers


def _by_shape(job: Job, layouts: LayoutColumns, costs: Costs) -> Iterator[tuple[IntColumn, Sequence[Split]]]:
    """Rows, and the layers by stage of each."""
    p, v, layers = layouts.pipeline, layouts.virtual_pipeline, job.shape.num_layers
    single = np.flatnonzero(v == 1)
    if job.stages_alike:
        most = np.full((len(single), int(p.max(initial=1))), layers)
        yield single, _of_ranks(job, layouts.take(single), costs.take(single), most)
    else:
        yield single, [_of_kinds(job, layouts.take(np.array([row])), costs, row) for row in single.tolist()]
    several = np.flatnonzero(v > 1)
    code = p[several] * (layers + 1) + v[several]
    for value in np.unique(code):
        rows = several[code == value]
        yield rows, _ends_apart(job, int(p[rows[0]]), int(v[rows[0]]), costs.take(rows))


def _of_ranks(job: Job, layouts: LayoutColumns, costs: Costs, most: IntColumn) -> list[Split]:
    """Alike layers, one chunk to a rank, no more than `most` layers each; empty where there is no such split."""
    layer = costs.mixture if job.shape.moe is not None else costs.dense
    table, _ = uneven(layer, costs.first, costs.last, layouts.pipeline, job.shape.num_layers, most)
    return [tuple(count for count in row if count) for row in table.tolist()]


def _of_kinds(job: Job, layout: LayoutColumns, costs: Costs, row: int, fits: NDArray[np.bool_] | None = None) -> Split:
    """Layers of two kinds, one chunk to a rank; empty where there is no such split."""
    layers = [float(costs.mixture[row] if kind else costs.dense[row]) for kind in _pattern(job)]
    found = balance(layers, float(costs.first[row]), float(costs.last[row]), int(layout.pipeline[0]), fits)
    return found or ()


def _ends_apart(job: Job, p: int, v: int, costs: Costs) -> list[Split]:
    """Several chunks to a rank: all virtual stages alike but the first and the last, whose ranks balance best. Chunks
    that differ in the middle would wait for each other, whatever their ranks add up to."""
    choices = [(first, *(usual,) * (p * v - 2), last) for first, usual, last in _ends(job.shape.num_layers, p * v)]
    if not choices:
        return [()] * len(costs.dense)
    slowest = [_slowest(job, p, split, costs) for split in choices]
    return [choices[best] for best in np.argmin(slowest, axis=0)]


def _ends(layers: int, stages: int) -> Iterator[tuple[int, int, int]]:
    """(layers of the first virtual stage, of each between, of the last)."""
    for usual in (layers // stages, layers // stages + 1):
        left = layers - (stages - 2) * usual
        for first in range(1, min(usual + 1, left) + 1):
            if usual and 0 <= left - first <= usual:
                yield first, usual, left - first


def _slowest(job: Job, p: int, split: Split, costs: Costs) -> FloatColumn:
    """Seconds of the slowest rank, of every row."""
    before = np.concatenate([[0], np.cumsum(_pattern(job))])
    ends = np.concatenate([[0], np.cumsum(split)])
    mixture = np.diff(before[ends]).reshape(-1, p).sum(axis=0)
    dense = np.array(split).reshape(-1, p).sum(axis=0) - mixture
    ranks = np.multiply.outer(costs.dense, dense) + np.multiply.outer(costs.mixture, mixture)
    ranks[:, 0] += costs.first
    ranks[:, -1] += costs.last
    return np.asarray(ranks.max(axis=1))


def _with_splits(layouts: LayoutColumns, splits: Sequence[Split]) -> LayoutColumns:
    known: dict[Split, int] = {(): 0}
    partition = [known.setdefault(split if len(set(split)) > 1 else (), len(known)) for split in splits]
    return replace(layouts, partition=np.array(partition, dtype=np.int64), partitions=tuple(known))
