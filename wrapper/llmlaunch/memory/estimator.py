"""The memory estimator: bytes per pipeline rank and term, for one layout or for a million."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

import numpy as np

from llmlaunch.frozen import frozen
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.candidates import Ranks, WorstRanks, candidate_ranks, pieces, worst_of
from llmlaunch.memory.guard import broken_law
from llmlaunch.memory.host import HostNode, host_terms, node_bytes
from llmlaunch.memory.job import Job, all_ranks
from llmlaunch.memory.peak import RESIDUAL, Terms, device_bytes, rank_sums, rank_terms


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
