"""How many micro-batches of each model chunk a pipeline rank keeps alive at its peak."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmlaunch.memory.job import FloatColumn, IntColumn, Job, RankColumns, once_for_rows

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
    if job.layers_by_rank is not None and np.any(v > 1):
        kept = np.where(v > 1, _uneven_chunks(rows, np.broadcast_to(np.asarray(group), chunks.shape), chunks), kept)
    mixture = np.divide(rows.moe_layers, layers, out=np.zeros(len(rows)), where=layers > 0)
    return InFlight(kept * (1.0 - mixture), kept * mixture, depth)


def _uneven_chunks(rows: RankColumns, group: IntColumn, chunks: IntColumn) -> FloatColumn:
    """Layers kept where a rank's layers do not fill its chunks: the embedding takes the place of a layer in the first
    chunk of the first rank, the head in the last chunk of the last (`--account-for-embedding-in-pipeline-split`,
    core 0.19). Elsewhere what is missing is spread."""
    v = rows.layouts.virtual_pipeline
    layers = rows.dense_layers + rows.moe_layers
    full = np.ceil(layers / v)
    missing = full * v - layers
    place = np.where(rows.last & ~rows.first, v - 1, 0)
    # chunks run in turn, a group of micro-batches each: how often the chunk at `place` is among the first `chunks`
    turns, rest = chunks // (group * v), chunks % (group * v)
    times = group * turns + np.clip(rest - place * group, 0, group)
    return full * chunks - missing * np.where(rows.first | rows.last, times, chunks / v)
