"""The memory estimator: bytes per pipeline rank and term, for one layout or for a million; and which ranks may be the
worst of a layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.model import model_of
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.effects import Effect, effects_of
from llmlaunch.memory.guard import broken_law
from llmlaunch.memory.host import HostNode, host_terms, node_bytes
from llmlaunch.memory.job import Job, RankColumns, all_ranks, ranks_at
from llmlaunch.memory.peak import RESIDUAL, Terms, device_bytes, rank_sums, rank_terms


def stages_alike(job: Job) -> bool:
    """Whether all pipeline ranks of even stages hold and train equally many layers of each kind."""
    return len(model_of(job.shape).decoder_kinds) == 1 and all(
        effect(job) for effect in effects_of(job, Effect.stages_alike)
    )


def all_are_candidates(job: Job, layouts: LayoutColumns) -> bool:
    """Whether any pipeline rank may be the worst of a layout, not only the first or the last.

    It may where stages differ, where inner ranks communicate with both neighbours, where prediction heads are on a
    stage before the last, where a technique leaves most there, and where matrices are packed whole into buffers whose
    padding does not grow with the rank's parameters (`layer_wise`). Otherwise no term of an inner rank exceeds that of
    the first rank.
    """
    inner = any(effect(job) for effect in effects_of(job, Effect.inner_ranks_hold_most))
    inner = inner or job.techniques.heads_before_loss or job.facts.states.matrices_whole
    return inner or not stages_alike(job) or "neighbours" in job.facts.exchange.groups or bool(np.any(layouts.uneven))


def candidate_ranks(job: Job, layouts: LayoutColumns, microbatches: IntColumn | None = None) -> RankColumns:
    """Return the pipeline ranks that can be a layout's worst.

    With even, alike stages, in-flight micro-batches fall from rank to rank and only the first and the last rank
    hold embeddings: the worst is one of those two. Otherwise every rank is a candidate (`all_are_candidates`).
    """
    if all_are_candidates(job, layouts):
        return all_ranks(job, layouts, microbatches)
    n = len(layouts)
    if not np.any(layouts.pipeline > 1):
        return ranks_at(job, layouts, np.arange(n), np.zeros(n, dtype=np.int64), microbatches, ends=True)
    index = np.concatenate([np.arange(n)] * 2)
    rank = np.concatenate([np.zeros(n, dtype=np.int64), layouts.pipeline - 1])
    return ranks_at(job, layouts, index, rank, microbatches, ends=True)


# The largest block glibc learns from, less what it puts around it (malloc/malloc.c, DEFAULT_MMAP_THRESHOLD_MAX).
LEARNT_BYTES = 32 * 2**20 - 2**16


@cache
def keep_freed_memory() -> None:
    """Make the process keep the memory that columns free, once. glibc returns freed memory at the end of the heap to
    the system from 128 KiB on, and columns come and go there: new pages took half of the formula's time. Freeing one
    mapped block teaches it to keep twice that block's size (mallopt(3), M_MMAP_THRESHOLD, "dynamic"). The block is
    never written to, so it costs nothing; other allocators are not affected."""
    np.empty(LEARNT_BYTES, dtype=np.int8)


# Ranks priced at a time. The formula makes hundreds of columns: these stay in the processor's cache, which halves the
# time of tens of thousands of layouts (benchmarks/memory_formula.py).
PIECE = 12288


@frozen
class WorstRanks:
    """The pipeline rank of each layout with the most device bytes (the first of equals), and those bytes."""

    pipeline_rank: IntColumn
    device_bytes: FloatColumn


@frozen
class Ranks:
    """Row numbers of the ranks of `count` layouts, in the order of `RankColumns`."""

    count: int
    layout_index: IntColumn
    rank: IntColumn
    ends: bool

    @classmethod
    def of(cls, rows: RankColumns, layouts: int) -> Ranks:
        return cls(layouts, rows.layout_index, rows.rank, rows.ends)

    @property
    def last(self) -> slice:
        """Rows of the last ranks where `ends` holds; they are the first ranks where no layout has more than one."""
        return slice(len(self.rank) - self.count, None)


def pieces(job: Job, layouts: LayoutColumns) -> Iterator[slice]:
    """Return slices of layouts whose candidate ranks are about PIECE each; one empty slice for no layouts."""
    keep_freed_memory()
    ranks = layouts.pipeline if all_are_candidates(job, layouts) else np.minimum(layouts.pipeline, 2)
    places = np.cumsum(ranks) // PIECE
    bounds = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(layouts)]
    return (slice(start, stop) for start, stop in pairwise(bounds))


def worst_of(ranks: Ranks, device: FloatColumn) -> WorstRanks:
    """Return the maximum of `device`, one number for each rank, over the ranks of each layout."""
    if not ranks.ends:
        return _of_all(ranks, device)
    first, last = device[: ranks.count], device[ranks.last]
    return WorstRanks(np.where(last > first, ranks.rank[ranks.last], 0), np.maximum(first, last))


def _of_all(ranks: Ranks, device: FloatColumn) -> WorstRanks:
    most = most_bytes(ranks, device)
    hits: NDArray[np.int64] = np.flatnonzero(device == most[ranks.layout_index])
    first = np.searchsorted(ranks.layout_index[hits], np.arange(ranks.count))
    return WorstRanks(ranks.rank[hits[first]], most)


def most_bytes(ranks: Ranks, column: FloatColumn) -> FloatColumn:
    """Return the maximum of `column`, one number for each rank, over the ranks of each layout."""
    if not ranks.ends:
        return np.asarray(np.maximum.reduceat(column, np.flatnonzero(ranks.rank == 0)))
    return np.maximum(column[: ranks.count], column[ranks.last])


@frozen
class RankEstimate:
    """One pipeline rank. `terms` sum to `device_bytes` exactly; allocated and reserved are partial sums of them."""

    pipeline_rank: int
    terms: Mapping[str, int]
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int


@frozen
class Estimate:
    """All pipeline ranks of one layout. `peak_kind` is what `device_bytes` means: "device" on GPUs, "resident"
    on a CPU-only machine. `fault` is a law of memory that the estimate breaks (memory/guard.py): then llmlaunch is
    wrong, and nothing may be called safe by it."""

    ranks: tuple[RankEstimate, ...]
    host_bytes_per_node: int | None  # null: the nodes are not known
    peak_kind: str = "device"
    host_terms: Mapping[str, int] = field(default_factory=dict)  # they sum to host_bytes_per_node
    fault: str | None = None

    @property
    def worst(self) -> RankEstimate:
        """The rank with the largest device bytes; the first of equals."""
        return max(self.ranks, key=lambda r: (r.device_bytes, -r.pipeline_rank))


NOT_MODELLED = (
    "page cache, and what data loader workers hold beside their batches",
    "expert routing less balanced than usual",
    "fragmentation beyond the allocator's usual cache",
)


def worst_ranks(job: Job, layouts: LayoutColumns) -> WorstRanks:
    """Return the exact maximum over all pipeline ranks of every layout (`candidate_ranks` says why two suffice)."""
    worst = [_worst_of_piece(job, layouts.take(piece)) for piece in pieces(job, layouts)]
    return WorstRanks(
        np.concatenate([piece.pipeline_rank for piece in worst]),
        np.concatenate([piece.device_bytes for piece in worst]),
    )


def _worst_of_piece(job: Job, layouts: LayoutColumns) -> WorstRanks:
    rows = candidate_ranks(job, layouts)
    transient, state_sums = rank_sums(job, rows)
    return worst_of(Ranks.of(rows, len(layouts)), device_bytes(transient, state_sums))


def estimate(
    job: Job,
    layout: Layout,
    num_microbatches: int | None = None,
    peak_kind: str = "device",
    node: HostNode | None = None,
) -> Estimate:
    """Return the bytes of every pipeline rank of one layout, and of its nodes' host memory where `node` says what runs
    on one. `num_microbatches` overrides what the workload implies."""
    microbatches = None if num_microbatches is None else np.array([num_microbatches])
    rows = all_ranks(job, LayoutColumns.of([layout]), microbatches)
    columns = rank_terms(job, rows)
    ranks = tuple(
        RankEstimate(
            pipeline_rank=int(rows.rank[i]),
            terms={name: int(column[i]) for name, column in columns.terms.items()},
            allocated_bytes=int(columns.allocated[i]),
            reserved_bytes=int(columns.reserved[i]),
            device_bytes=int(columns.device[i]),
        )
        for i in range(len(rows))
    )
    fault = _fault(ranks, columns)
    if node is None:
        return Estimate(ranks, host_bytes_per_node=None, peak_kind=peak_kind, fault=fault)
    total, by_term = node_bytes(host_terms(job, rows, node), node)
    host_fault = broken_law(by_term, 0.0, 0.0)
    fault = fault or (None if host_fault is None else f"of a node's host memory, {host_fault}")
    return Estimate(ranks, host_bytes_per_node=total, peak_kind=peak_kind, host_terms=by_term, fault=fault)


def _fault(ranks: Sequence[RankEstimate], columns: Terms) -> str | None:
    """Return the first law that a rank breaks. The residual of measured runs may be negative and is left out."""
    for i, rank in enumerate(ranks):
        terms = {name: size for name, size in rank.terms.items() if name != RESIDUAL}
        law = broken_law(terms, rank.reserved_bytes, float(columns.least[i]))
        if law is not None:
            return f"on pipeline rank {rank.pipeline_rank}, {law}"
    return None
