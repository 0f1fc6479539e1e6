"""Many layouts priced from their halves: what runs and what is held, each worked out once, added and compared.

A search's layouts are a product. What is held knows few of its fields (`held_fields`) and what runs few others, so
millions of layouts share thousands of halves, and a layout costs a look-up, a few sums and a maximum. The sums are of
whole bytes, so the result is that of `worst_ranks` and `worst_hosts`, to the byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.guard import unless_negative
from llmlaunch.memory.host import HostNode, state_host_terms, transient_host_terms
from llmlaunch.memory.job import Job, RankColumns, all_are_candidates, candidate_ranks
from llmlaunch.memory.moments import state_terms, transient_terms
from llmlaunch.memory.peak import StateSums, TransientSums, device_bytes, sum_of
from llmlaunch.memory.states import states
from llmlaunch.memory.worst import Ranks, most_bytes, pieces, worst_of

__all__ = [
    "ModelStateBytes",
    "TransientBytes",
    "WorstBytes",
    "distinct_states",
    "model_state_bytes",
    "state_fields",
    "transient_bytes",
    "worst_of_sums",
]

FIELDS = ("tensor", "pipeline", "context", "data", "expert", "expert_tensor", "zero_stage", "partition")


def state_fields(job: Job, layouts: LayoutColumns) -> tuple[str, ...]:
    """The fields of a layout that what is held depends on. The chunks of a pipeline decide which layers a rank holds
    where layers differ or stages are uneven, and how many of them are moved into their buffers at a time."""
    by_chunk = job.facts.moved_to_buffers or all_are_candidates(job, layouts)
    return (*FIELDS, "virtual_pipeline") if by_chunk else FIELDS


def distinct_states(job: Job, layouts: LayoutColumns) -> tuple[LayoutColumns, IntColumn]:
    """Layouts that differ in `held_fields`, and of each of `layouts` the place of the one that agrees with it."""
    code = np.zeros(len(layouts), dtype=np.int64)
    for name in state_fields(job, layouts):
        values, place = np.unique(getattr(layouts, name), return_inverse=True)
        code = code * len(values) + place
    _, first, of = np.unique(code, return_index=True, return_inverse=True)
    return layouts.take(first), of


@dataclass(frozen=True)
class TransientPiece:
    """Candidate ranks of a few layouts."""

    ranks: Ranks
    several: IntColumn  # of each layout, 1 where a step has more than one micro-batch
    sums: TransientSums
    host: FloatColumn


@dataclass(frozen=True)
class TransientBytes:
    """What runs, of layouts in order. It does not depend on the ZeRO stage, on the type of gradients, on optimizer
    states and parameters on the host."""

    pieces: tuple[TransientPiece, ...]

    def __len__(self) -> int:
        return sum(piece.ranks.count for piece in self.pieces)


@dataclass(frozen=True)
class ModelStateBytes:
    """What is held, of each layout twice: with one micro-batch in a step, and then with several. `first_row` and
    `last_row` are where the first and the last rank of each of these lie."""

    node: HostNode
    layouts: int
    ends: bool
    first_row: IntColumn
    last_row: IntColumn
    sums: StateSums
    host: FloatColumn


@dataclass(frozen=True)
class WorstBytes:
    """Per layout: the pipeline rank with the most device bytes (the first of equals), those bytes, and the bytes of a
    node's host memory."""

    pipeline_rank: IntColumn
    device_bytes: FloatColumn
    host_bytes: FloatColumn


def transient_bytes(
    job: Job, layouts: LayoutColumns, node: HostNode, microbatches: IntColumn | None = None
) -> TransientBytes:
    """`microbatches` overrides what the workload implies, layout by layout."""
    if microbatches is None:
        microbatches = layouts.num_microbatches(job.workload.global_batch_size)
    return TransientBytes(
        tuple(_running_piece(job, layouts.take(piece), node, microbatches[piece]) for piece in pieces(job, layouts))
    )


def _running_piece(job: Job, layouts: LayoutColumns, node: HostNode, microbatches: IntColumn) -> TransientPiece:
    rows = candidate_ranks(job, layouts, microbatches)
    return TransientPiece(
        ranks=Ranks.of(rows, len(layouts)),
        several=(microbatches > 1).astype(np.int64),
        sums=TransientSums.of(job, rows, transient_terms(job, rows)),
        host=_host_sum(transient_host_terms(job, rows, node)),
    )


def _host_sum(terms: Mapping[str, FloatColumn]) -> FloatColumn:
    return unless_negative(sum_of(terms.values()), terms.values())


def model_state_bytes(job: Job, layouts: LayoutColumns, node: HostNode) -> ModelStateBytes:
    """Reads `held_fields` of the layouts alone."""
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


def worst_of_sums(running: TransientBytes, held: ModelStateBytes, held_of: IntColumn) -> WorstBytes:
    """Every layout of `running` with the state of that of `held` at `held_of`, which agrees with it in `held_fields`
    (whatever `running` was given as ZeRO stage). Both halves are of one job, but for what the other does not read.

    Raises:
        ValueError: uneven stages of `running` that are even in `held`.
    """
    rank = np.empty(len(running), dtype=np.int64)
    device, host = np.empty(len(running)), np.empty(len(running))
    start = 0
    for piece in running.pieces:
        here = slice(start, start + piece.ranks.count)
        rows = _held_rows(piece, held, held_of[here])
        bytes_ = device_bytes(piece.sums, held.sums.take(rows))
        worst = worst_of(piece.ranks, bytes_)
        rank[here], device[here] = worst.pipeline_rank, worst.device_bytes
        process = piece.host + np.take(held.host, rows)
        host[here] = most_bytes(piece.ranks, process + bytes_ if held.node.resident else process)
        start = here.stop
    return WorstBytes(rank, device, held.node.processes * host)


def _held_rows(piece: TransientPiece, held: ModelStateBytes, held_of: IntColumn) -> IntColumn:
    """The held row of each rank of a piece."""
    layout = held_of + held.layouts * piece.several
    first = np.take(held.first_row, layout)
    if piece.ranks.ends:
        one_each = len(piece.ranks.rank) == len(first)
        return first if one_each else np.concatenate([first, np.take(held.last_row, layout)])
    if held.ends and len(first):
        raise ValueError("uneven stages need a held half of the same uneven stages")
    rows: IntColumn = np.take(first, piece.ranks.layout_index) + piece.ranks.rank
    return rows
