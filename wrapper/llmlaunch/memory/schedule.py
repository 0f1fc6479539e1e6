"""How many micro-batches of each model chunk a pipeline rank keeps alive at its peak."""

from __future__ import annotations

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
        kept = np.where(uneven, _uneven_chunks(job, rows, group, chunks), kept)
    if job.shape.moe is None:
        return InFlight(kept, np.zeros(len(rows)), depth)
    mixture = np.divide(rows.moe_layers, layers, out=np.zeros(len(rows)), where=layers > 0)
    return InFlight(kept * (1.0 - mixture), kept * mixture, depth)


def _uneven_chunks(job: Job, rows: RankColumns, group: IntColumn, chunks: IntColumn) -> FloatColumn:
    """Layers kept where a rank's chunks differ: chunks run in turn, a group of micro-batches each, so each chunk is a
    known number of times among the first `chunks`."""
    turns, rest = np.divmod(chunks, group * rows.layouts.virtual_pipeline)
    kept = np.zeros(len(rows))
    for place, (start, stop) in enumerate(chunk_ranges(job.shape, rows.layouts, rows.rank)):
        kept += (group * turns + np.clip(rest - place * group, 0, group)) * (stop - start)
    return kept
