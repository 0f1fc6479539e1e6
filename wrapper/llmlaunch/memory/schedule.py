"""How many micro-batches of each model chunk a pipeline rank keeps alive at its peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmlaunch.memory.job import FloatColumn, IntColumn, Job, RankColumns, chunk_ranges, once_for_rows

__all__ = ["InFlight", "in_flight"]


@dataclass(frozen=True)
class InFlight:
    """`dense` and `mixture` layers kept alive, counted once for each micro-batch in flight; `depth` is micro-batches'
    worth of the whole rank."""

    dense: FloatColumn
    mixture: FloatColumn
    depth: FloatColumn


@once_for_rows
def in_flight(job: Job, rows: RankColumns) -> InFlight:
    """1F1B: min(m, p - r) (PipeDream-Flush, Narayanan et al. 2021, section 2.2).

    Interleaved with v chunks in groups of g micro-batches: min(2 (p - r - 1) + (v - 1) g + 1, m v) chunks of 1/v each
    (megatron/core/pipeline_parallel/schedules.py, core 0.19).
    """
    p, v, m = rows.layouts.pipeline, rows.layouts.virtual_pipeline, rows.microbatches
    plain = np.minimum(m, p - rows.rank)
    group = p if job.microbatch_group is None else job.microbatch_group
    chunks = np.minimum(2 * (p - rows.rank - 1) + (v - 1) * group + 1, m * v)
    depth = np.where(v > 1, chunks / v, plain).astype(np.float64)
    layers = rows.dense_layers + rows.moe_layers
    kept = layers * depth
    uneven = rows.layouts.uneven & (v > 1)
    if np.any(uneven):
        group = np.broadcast_to(np.asarray(group), chunks.shape)
        kept[uneven] = _uneven_chunks(job, rows, group, chunks, np.flatnonzero(uneven))
    if job.shape.moe is None:
        return InFlight(kept, np.zeros(len(rows)), depth)
    mixture = np.divide(rows.moe_layers, layers, out=np.zeros(len(rows)), where=layers > 0)
    return InFlight(kept * (1.0 - mixture), kept * mixture, depth)


def _uneven_chunks(job: Job, rows: RankColumns, group: IntColumn, chunks: IntColumn, which: IntColumn) -> FloatColumn:
    """Layers kept by the rows `which`, whose chunks differ. The last rank's count is that of its first loss; when later
    ones leave it more, it has no logits. Few rows differ in what decides it: the split, the rank, and how many groups
    of micro-batches there are, up to four."""
    lay, few = rows.layouts, np.minimum(rows.microbatches, 4 * group)
    key = np.zeros(len(which), dtype=np.int64)
    for column in (lay.partition, lay.pipeline, lay.virtual_pipeline, rows.rank, few, group):
        key = key * (int(column.max()) + 1) + column[which]
    _, example, same = np.unique(key, return_index=True, return_inverse=True)
    row = which[example]
    v, g, m = lay.virtual_pipeline[row], group[row], few[row]
    layers = [stop - start for start, stop in chunk_ranges(job.shape, lay.take(row), rows.rank[row])]
    first = np.minimum(chunks[row], m * v)
    most = _alive(layers, v, g, first, np.zeros_like(first))
    for turn in range(int(v.max())):
        for later in (turn * g, -first % g + turn * g):  # a forward or a backward pass is the first of its group
            later = np.where(rows.last[row], 0, np.minimum(later, m * v - first))
            most = np.maximum(most, _alive(layers, v, g, first + later, later))
    return most[same]


def _alive(
    layers: Sequence[IntColumn], chunks: IntColumn, group: IntColumn, forward: IntColumn, backward: IntColumn
) -> FloatColumn:
    """Layers alive after so many forward and backward passes of chunks. Forward passes take the chunks in turn, a group
    of micro-batches each, backward passes in reverse."""
    alive = np.zeros(len(chunks))
    for place, count in enumerate(layers):
        alive += (_passes(forward, place, chunks, group) - _passes(backward, chunks - 1 - place, chunks, group)) * count
    return alive


def _passes(passes: IntColumn, place: IntColumn | int, chunks: IntColumn, group: IntColumn) -> IntColumn:
    """How many of the first passes are of the chunk at this place of a turn."""
    turns, rest = np.divmod(passes, group * chunks)
    taken: IntColumn = group * turns + np.clip(rest - place * group, 0, group)
    return taken
