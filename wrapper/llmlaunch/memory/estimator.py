"""The estimator: bytes per pipeline rank and term, for one layout or for a million."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.estimate import Estimate, RankEstimate
from llmlaunch.memory.host import Node, host_terms, node_bytes
from llmlaunch.memory.job import FloatColumn, Job, all_ranks, candidate_ranks
from llmlaunch.memory.terms import rank_terms

__all__ = ["NOT_MODELLED", "WorstRanks", "estimate", "worst_ranks"]

NOT_MODELLED = (
    "page cache, and what data loader workers hold beside their batches",
    "expert routing less balanced than usual",
    "fragmentation beyond the allocator's usual cache",
)


# Layouts priced at a time. The formula makes hundreds of columns: these stay in the processor's cache, which halves the
# time of tens of thousands of layouts (benchmarks/memory_formula.py).
PIECE = 4096


@dataclass(frozen=True)
class WorstRanks:
    """Per layout: the pipeline rank with the most device bytes (the first of equals), and those bytes."""

    pipeline_rank: NDArray[np.int64]
    device_bytes: FloatColumn


def worst_ranks(job: Job, layouts: LayoutColumns) -> WorstRanks:
    """The maximum over all pipeline ranks of every layout, exactly (`candidate_ranks` says why two suffice)."""
    starts = range(0, max(len(layouts), 1), PIECE)
    pieces = [_worst_of_piece(job, layouts.piece(start, start + PIECE)) for start in starts]
    return WorstRanks(
        np.concatenate([piece.pipeline_rank for piece in pieces]),
        np.concatenate([piece.device_bytes for piece in pieces]),
    )


def _worst_of_piece(job: Job, layouts: LayoutColumns) -> WorstRanks:
    rows = candidate_ranks(job, layouts)
    device = rank_terms(job, rows).device
    n = len(layouts)
    if job.stages_alike and not np.any(layouts.uneven):
        return _of_two(n, rows.layout_index, rows.rank, device)
    order = np.lexsort((-rows.rank, device, rows.layout_index))
    last_of_layout = np.searchsorted(rows.layout_index[order], np.arange(n), side="right") - 1
    worst = order[last_of_layout]
    return WorstRanks(rows.rank[worst], device[worst])


def _of_two(n: int, index: NDArray[np.int64], rank: NDArray[np.int64], device: FloatColumn) -> WorstRanks:
    """First ranks of all layouts, then last ranks of some: no sort needed."""
    worst, bytes_ = np.zeros(n, dtype=np.int64), device[:n].copy()
    split, last = index[n:], device[n:]
    larger = last > bytes_[split]
    bytes_[split[larger]] = last[larger]
    worst[split[larger]] = rank[n:][larger]
    return WorstRanks(worst, bytes_)


def estimate(
    job: Job,
    layout: Layout,
    num_microbatches: int | None = None,
    peak_kind: str = "device",
    node: Node | None = None,
) -> Estimate:
    """Every pipeline rank of one layout, and the host memory of its nodes where `node` says what runs on one.
    `num_microbatches` overrides what the workload implies."""
    given = None if num_microbatches is None else np.array([num_microbatches])
    rows = all_ranks(job, LayoutColumns.of([layout]), given)
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
    if node is None:
        return Estimate(ranks, host_bytes_per_node=None, peak_kind=peak_kind)
    total, by_term = node_bytes(host_terms(job, rows, node), node)
    return Estimate(ranks, host_bytes_per_node=total, peak_kind=peak_kind, host_terms=by_term)
