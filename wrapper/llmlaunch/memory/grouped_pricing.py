"""Bytes of many layouts as the sum of model states and transient bytes, each priced once per distinct group.

A search's layouts are a product. Model states depend on few of its fields (`state_fields`) and transient bytes on few
others, so millions of layouts share thousands of parts, and a layout costs a look-up, a few sums and a maximum. The
sums are of whole bytes, so the result equals that of `worst_ranks` and `estimate` to the byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.frozen import frozen
from llmlaunch.layout import TECHNIQUE_FIELDS, LayoutColumns
from llmlaunch.memory.estimator import Ranks, all_are_candidates, candidate_ranks, most_bytes, pieces, worst_of
from llmlaunch.memory.guard import unless_negative
from llmlaunch.memory.host import HostNode, state_host_terms, transient_host_terms
from llmlaunch.memory.job import Job, RankColumns, one_rank
from llmlaunch.memory.moments import state_terms, transient_terms
from llmlaunch.memory.peak import StateSums, TransientSums, device_bytes, sum_of
from llmlaunch.memory.states import states

FIELDS = ("tensor", "pipeline", "context", "data", "expert", "expert_tensor", "zero_stage", "partition")


def state_fields(job: Job, layouts: LayoutColumns) -> tuple[str, ...]:
    """Return the layout fields that model states depend on. The chunks of a pipeline decide which layers a rank holds
    where layers differ or stages are uneven, and how many of them are moved into their buffers at a time."""
    by_chunk = job.facts.states.moved_to_buffers or all_are_candidates(job, layouts)
    recompute = ("recompute",) if job.facts.zero.gathered_weights_kept else ()
    return (*FIELDS, *recompute, "virtual_pipeline") if by_chunk else (*FIELDS, *recompute)


def distinct_states(job: Job, layouts: LayoutColumns) -> tuple[LayoutColumns, IntColumn]:
    """Return the layouts that differ in `state_fields`, and for each of `layouts` the index of its representative."""
    return layouts.distinct(state_fields(job, layouts))


@frozen
class RankPiece:
    """The candidate ranks of a few layouts, those at `layouts` of all. With the rows goes what was computed of them
    once, whatever is recomputed or offloaded."""

    layouts: slice
    microbatches: IntColumn
    rows: RankColumns


@frozen
class TransientPiece:
    """Transient bytes of the candidate ranks of a few layouts."""

    ranks: Ranks
    several: IntColumn  # of each layout, 1 where a step has more than one micro-batch
    sums: TransientSums
    host: FloatColumn


@frozen
class TransientBytes:
    """What a step adds to the model states, for layouts in order. It does not depend on the ZeRO stage, the data type
    of gradients, or what is offloaded of optimizer states and parameters."""

    pieces: tuple[TransientPiece, ...]

    def __len__(self) -> int:
        return sum(piece.ranks.count for piece in self.pieces)


@frozen
class ModelStateBytes:
    """Model states of each layout twice: with one micro-batch in a step, and with several. `first_row` and `last_row`
    are the row numbers of the first and the last rank of each."""

    node: HostNode
    layouts: int
    ends: bool
    first_row: IntColumn
    last_row: IntColumn
    sums: StateSums
    host: FloatColumn

    @classmethod
    def joined(cls, several: Sequence[ModelStateBytes]) -> ModelStateBytes:
        """Return the layouts of one after those of the other; their jobs have the same facts."""
        starts = np.cumsum([0, *(len(each.host) for each in several)])

        def rows(columns: Sequence[IntColumn]) -> IntColumn:
            moved = [column + start for column, start in zip(columns, starts, strict=False)]
            halves = [np.split(column, 2) for column in moved]  # one micro-batch in a step, then several
            return np.concatenate([half[i] for i in range(2) for half in halves])

        return cls(
            node=several[0].node,
            layouts=sum(each.layouts for each in several),
            ends=several[0].ends,
            first_row=rows([each.first_row for each in several]),
            last_row=rows([each.last_row for each in several]),
            sums=StateSums.joined([each.sums for each in several]),
            host=np.concatenate([each.host for each in several]),
        )


@frozen
class WorstBytes:
    """Per layout: the pipeline rank with the most device bytes (the first of equals), those bytes, and the bytes of a
    node's host memory."""

    pipeline_rank: IntColumn
    device_bytes: FloatColumn
    host_bytes: FloatColumn


def rank_pieces(job: Job, layouts: LayoutColumns) -> tuple[RankPiece, ...]:
    """Return the candidate ranks of `layouts`."""
    microbatches = layouts.num_microbatches(job.workload.global_batch_size)
    return tuple(
        RankPiece(piece, microbatches[piece], candidate_ranks(job, layouts.take(piece), microbatches[piece]))
        for piece in pieces(job, layouts)
    )


def transient_bytes(
    job: Job, layouts: LayoutColumns, node: HostNode, ranks: Sequence[RankPiece] | None = None
) -> TransientBytes:
    """Return the transient bytes of `layouts`, whose `ranks` may be those of the same splits with other techniques."""
    if ranks is None:
        ranks = rank_pieces(job, layouts)
    else:
        ranks = [replace(piece, rows=_with_techniques_of(layouts, piece)) for piece in ranks]
    return TransientBytes(tuple(_transient_piece(job, piece, node) for piece in ranks))


def _with_techniques_of(layouts: LayoutColumns, piece: RankPiece) -> RankColumns:
    """Return a piece's rows with the techniques of `layouts`."""
    techniques: dict[str, Any] = {
        name: np.take(getattr(layouts, name)[piece.layouts], piece.rows.layout_index) for name in TECHNIQUE_FIELDS
    }
    return piece.rows.with_layouts(replace(piece.rows.layouts, **techniques))


def rank_bytes(jobs: Sequence[Job], layouts: Sequence[LayoutColumns], rank: IntColumn) -> list[FloatColumn]:
    """Return the device bytes of one pipeline rank of each layout, for several jobs that share their transient bytes:
    the same layouts with other techniques of the model states."""
    transient: TransientSums | None = None
    device = []
    for job, mine in zip(jobs, layouts, strict=True):
        rows = one_rank(job, mine, rank)
        transient = transient or TransientSums.of(job, rows, transient_terms(job, rows))
        state = states(job, rows)
        device.append(device_bytes(transient, StateSums.of(job, rows, state_terms(job, rows, state), state)))
    return device


def _transient_piece(job: Job, piece: RankPiece, node: HostNode) -> TransientPiece:
    rows = piece.rows
    return TransientPiece(
        ranks=Ranks.of(rows, len(piece.microbatches)),
        several=(piece.microbatches > 1).astype(np.int64),
        sums=TransientSums.of(job, rows, transient_terms(job, rows)),
        host=_host_sum(transient_host_terms(job, rows, node)),
    )


def _host_sum(terms: Mapping[str, FloatColumn]) -> FloatColumn:
    return unless_negative(sum_of(terms.values()), terms.values())


def model_state_bytes(job: Job, layouts: LayoutColumns, node: HostNode) -> ModelStateBytes:
    """Return the model states of `layouts`, of which only `state_fields` are read."""
    n = len(layouts)
    twice = layouts.take(np.concatenate([np.arange(n), np.arange(n)]))
    rows = candidate_ranks(job, twice, np.repeat([1, 2], n))
    state = states(job, rows)
    first, last = _first_and_last(rows, 2 * n)
    return ModelStateBytes(
        node=node,
        layouts=n,
        ends=rows.ends,
        first_row=first,
        last_row=last,
        sums=StateSums.of(job, rows, state_terms(job, rows, state), state),
        host=_host_sum(state_host_terms(job, rows, node)),
    )


def _first_and_last(rows: RankColumns, layouts: int) -> tuple[IntColumn, IntColumn]:
    first, last = np.zeros(layouts, dtype=np.int64), np.zeros(layouts, dtype=np.int64)
    for place, of in ((first, rows.first), (last, rows.last)):
        at = np.flatnonzero(of)
        place[rows.layout_index[at]] = at
    return first, last


def worst_of_sums(transient: TransientBytes, model_states: ModelStateBytes, state_of: IntColumn) -> WorstBytes:
    """Return the worst rank of every layout of `transient` with the model states at `state_of`, which must agree with
    it in `state_fields` (whatever ZeRO stage `transient` was built with). Both parts belong to one job, except for
    settings that the other part does not read.

    Raises:
        ValueError: stages are uneven in `transient` and even in `model_states`.
    """
    rank = np.empty(len(transient), dtype=np.int64)
    device, host = np.empty(len(transient)), np.empty(len(transient))
    start = 0
    for piece in transient.pieces:
        here = slice(start, start + piece.ranks.count)
        rows = _state_rows(piece, model_states, state_of[here])
        bytes_ = device_bytes(piece.sums, model_states.sums.take(rows))
        worst = worst_of(piece.ranks, bytes_)
        rank[here], device[here] = worst.pipeline_rank, worst.device_bytes
        process = piece.host + np.take(model_states.host, rows)
        host[here] = most_bytes(piece.ranks, process + bytes_ if model_states.node.resident else process)
        start = here.stop
    return WorstBytes(rank, device, model_states.node.processes * host)


def _state_rows(piece: TransientPiece, model_states: ModelStateBytes, state_of: IntColumn) -> IntColumn:
    """Return the row of the model states for each rank of a piece."""
    layout = state_of + model_states.layouts * piece.several
    first = np.take(model_states.first_row, layout)
    if piece.ranks.ends:
        single_rows = len(piece.ranks.rank) == len(first)
        return first if single_rows else np.concatenate([first, np.take(model_states.last_row, layout)])
    if model_states.ends and len(first):
        raise ValueError("uneven stages need model states of the same uneven stages")
    rows: IntColumn = np.take(first, piece.ranks.layout_index) + piece.ranks.rank
    return rows
