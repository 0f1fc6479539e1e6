"""The memory estimator: bytes per pipeline rank and term, for one layout or for a million."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.estimate import Estimate, RankEstimate
from llmlaunch.memory.guard import broken_law
from llmlaunch.memory.host import HostNode, host_terms, node_bytes
from llmlaunch.memory.job import Job, all_ranks, candidate_ranks
from llmlaunch.memory.peak import device_bytes, rank_sums
from llmlaunch.memory.terms import RESIDUAL, Terms, rank_terms
from llmlaunch.memory.worst import Ranks, WorstRanks, pieces, worst_of

__all__ = ["NOT_MODELLED", "WorstRanks", "estimate", "worst_ranks"]

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
