"""How many micro-batches of each model chunk a pipeline rank keeps alive at its peak."""

from __future__ import annotations

from functools import reduce

import numpy as np

from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.model import model_of
from llmlaunch.memory.answers import once_for_splits
from llmlaunch.memory.job import Job, RankColumns, chunk_ranges, head_rank
from llmlaunch.memory.layer_bytes import layers_of


@frozen
class InFlight:
    """The layers alive of each group of `RankColumns`, counted once for each micro-batch in flight; `depth` counts
    micro-batches of the whole rank, and `heads` those that have passed prediction heads."""

    alive: tuple[FloatColumn, ...]
    depth: FloatColumn
    heads: FloatColumn

    @property
    def layers(self) -> FloatColumn:
        """All layers alive."""
        return reduce(np.add, self.alive)


@once_for_splits
def in_flight(job: Job, rows: RankColumns) -> InFlight:
    """Return what is in flight at a rank's peak. 1F1B: min(m, p - r) (PipeDream-Flush, Narayanan et al. 2021, section
    2.2).

    Interleaved with v chunks in groups of g micro-batches: min(2 (p - r - 1) + (v - 1) g + 1, m v) chunks of 1/v each
    (megatron/core/pipeline_parallel/schedules.py, core 0.19). Where tokens of one micro-batch travel while another one
    computes, the forward pass that a steady schedule makes before each backward pass runs beside it, layer by layer:
    the warm-up is one pass longer (the same, get_pp_rank_microbatches) and the steady part adds none, so that there are
    as many, and for a moment what `paired_layer` says (techniques/expert_overlap.py) of one layer more.
    """
    p, v, m = rows.layouts.pipeline, rows.layouts.virtual_pipeline, rows.microbatches
    plain = np.minimum(m, p - rows.rank)
    group = p if job.microbatch_group is None else job.microbatch_group
    chunks = np.minimum(2 * (p - rows.rank - 1) + (v - 1) * group + 1, m * v)
    depth = np.where(v > 1, chunks / v, plain).astype(np.float64)
    alive = [count * depth for count in rows.counts]
    heads = last_chunk_in_flight(job, rows)
    apart = (rows.layouts.uneven | (len(model_of(job.shape).decoder_kinds) > 1)) & (v > 1)
    if np.any(apart):
        group = np.broadcast_to(np.asarray(group), chunks.shape)
        *exact, here = _by_chunk(job, rows, group, chunks, np.flatnonzero(apart))
        for column, size in zip(alive, exact, strict=True):
            column[apart] = size
        if job.techniques.heads_before_loss:
            heads[apart] = np.where((rows.rank == head_rank(job, rows.layouts))[apart], here, heads[apart])
    return InFlight(tuple(alive), depth, heads)


def last_chunk_in_flight(job: Job, rows: RankColumns) -> FloatColumn:
    """Return how many micro-batches the last chunk of each row's rank has in flight at most: one on the last rank, and
    before it as many more as passes of later stages come between its own forward and backward pass."""
    p, v, m = rows.layouts.pipeline, rows.layouts.virtual_pipeline, rows.microbatches
    later = p - 1 - rows.rank
    group = p if job.microbatch_group is None else job.microbatch_group
    return np.minimum(np.where(v > 1, np.minimum(2 * later + 1, group), later + 1), m).astype(np.float64)


def _by_chunk(
    job: Job, rows: RankColumns, group: IntColumn, chunks: IntColumn, which: IntColumn
) -> tuple[FloatColumn, ...]:
    """Return the layers of each group and the prediction heads alive in the rows `which`, whose chunks differ, when
    they hold most bytes. The last rank is counted at its first loss; when later ones leave it more, it has no logits.
    Few rows differ in what decides it: the split, the rank, and how many groups of micro-batches there are, up to
    four."""
    lay, few = rows.layouts, np.minimum(rows.microbatches, 4 * group)
    key = np.zeros(len(which), dtype=np.int64)
    for column in (lay.partition, lay.pipeline, lay.virtual_pipeline, rows.rank, few, group):
        key = key * (int(column.max()) + 1) + column[which]
    _, example, same = np.unique(key, return_index=True, return_inverse=True)
    row = which[example]
    v, g, m = lay.virtual_pipeline[row], group[row], few[row]
    layers = _layers_of_chunks(job, rows, row)
    first = np.minimum(chunks[row], m * v)
    moments = [_alive(layers, v, g, first, np.zeros_like(first))]
    for turn in range(int(v.max())):
        for later in (turn * g, -first % g + turn * g):  # a forward or a backward pass is the first of its group
            later = np.where(rows.last[row], 0, np.minimum(later, m * v - first))
            moments.append(_alive(layers, v, g, first + later, later))
    return _heaviest(job, rows, np.stack(moments), same, which)


def _heaviest(
    job: Job, rows: RankColumns, moments: FloatColumn, same: IntColumn, which: IntColumn
) -> tuple[FloatColumn, ...]:
    """Return what is alive at that of the `moments` (moment, group, distinct row) at which a row saves most bytes."""
    layers = layers_of(job, rows)
    weights = [*layers.by_group(layers.totals), job.shape.mtp_num_layers * layers.predicted(layers.totals)]
    alive = moments[:, :, same]
    best = np.sum([alive[:, place] * weight[which] for place, weight in enumerate(weights)], axis=0).argmax(axis=0)
    return tuple(np.take_along_axis(alive, best[None, None, :], axis=0)[0])


def _layers_of_chunks(job: Job, rows: RankColumns, row: IntColumn) -> IntColumn:
    """Return the layers of the ranks at some rows, (chunk, group or all prediction heads, row). Heads beside the loss
    are alive when that is computed, and are not counted with the layers."""
    layouts, rank, model = rows.layouts.take(row), rows.rank[row], model_of(job.shape)
    heads = job.techniques.heads_before_loss & (rank == head_rank(job, layouts))
    layers = []
    for chunk, (start, stop) in enumerate(chunk_ranges(len(model.order), layouts, rank)):
        held = [before[stop] - before[start] for before in model.before]
        groups = [sum((held[kind] for kind in kinds), np.zeros_like(start)) for kinds in rows.groups]
        layers.append(np.stack((*groups, heads & (chunk == layouts.virtual_pipeline - 1))))
    return np.stack(layers)


def _alive(
    layers: IntColumn, chunks: IntColumn, group: IntColumn, forward: IntColumn, backward: IntColumn
) -> FloatColumn:
    """Return the layers of each group alive after so many forward and backward passes of chunks. Forward passes take
    the chunks in turn, a group of micro-batches each, backward passes in reverse."""
    places = np.arange(len(layers))[:, None]
    begun, done = _passes(forward, places, chunks, group), _passes(backward, chunks - 1 - places, chunks, group)
    alive: FloatColumn = np.einsum("cr,ckr->kr", begun - done, layers).astype(np.float64)
    return alive


def _passes(passes: IntColumn, places: IntColumn, chunks: IntColumn, group: IntColumn) -> IntColumn:
    """Return how many of the first `passes` belong to the chunks at `places` of a turn, (chunk, row)."""
    turns, rest = np.divmod(passes, group * chunks)
    done: IntColumn = group * turns + np.clip(rest - places * group, 0, group)
    return done
