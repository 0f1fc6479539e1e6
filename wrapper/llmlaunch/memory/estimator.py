"""The memory estimator: bytes per pipeline rank and term, for one layout or for a million; which ranks may be the worst
of a layout; and the host memory of a node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from functools import cache, reduce
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.model import model_of
from llmlaunch.layers.parameters import count_parameters
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.activations import kept_activations, loads_batches
from llmlaunch.memory.effects import Effect, HostBytes, effects_in_use, effects_of, optimizer_on_device
from llmlaunch.memory.guard import broken_law
from llmlaunch.memory.job import Job, RankColumns, all_ranks, ranks_at
from llmlaunch.memory.loss import saved_by_heads
from llmlaunch.memory.peak import RESIDUAL, Terms, device_bytes, rank_sums, rank_terms
from llmlaunch.memory.states import sharded_parameters
from llmlaunch.memory.tokens import tokens
from llmlaunch.memory.weights import rank_parameters

MASK_BYTES_MADE = 8.0  # of an entry while a mask is made: ones, and their lower triangle, in fp32
BATCH_BYTES_PER_TOKEN = 40.0  # token ids, labels, positions and two masks, 8 bytes each


@frozen
class HostNode:
    """What runs on one node. On a CPU-only machine (`resident`) devices are processes, and their bytes are host
    memory."""

    processes: int
    checkpoints: bool = False
    resident: bool = False


def host_terms(job: Job, rows: RankColumns, node: HostNode) -> dict[str, FloatColumn]:
    """Return the whole bytes of one process of each row's rank, by term."""
    device = {"processes": rank_terms(job, rows).device} if node.resident else {}
    return {**device, **transient_host_terms(job, rows, node), **state_host_terms(job, rows, node)}


def transient_host_terms(job: Job, rows: RankColumns, node: HostNode) -> dict[str, FloatColumn]:
    """Return the terms that follow from the micro-batch and from recomputed or offloaded activations."""
    terms = {"offloaded_activations": _activations(job, rows, node)}
    for effect in effects_of(job, Effect.on_host):
        terms |= {term: _bytes(held, node) for term, held in effect(job, rows).items()}
    if not node.resident:
        terms["data_loader"] = _data_loader(job, rows)
    return {name: np.rint(column) for name, column in terms.items()}


def state_host_terms(job: Job, rows: RankColumns, node: HostNode) -> dict[str, FloatColumn]:
    """Return the terms that follow from the split and from sharded or offloaded states. Where devices are processes,
    the device's bytes come on top."""
    held = {term: held for effect in effects_of(job, Effect.states_on_host) for term, held in effect(job, rows).items()}
    terms = {term: _bytes(each, node) for term, each in held.items()}
    if not node.resident:
        terms["processes"] = np.full(len(rows), job.facts.host.process_bytes)
        terms["checkpoint"] = _checkpoint(job, rows) if node.checkpoints else np.zeros(len(rows))
        loading = _loading(job, rows, node)
        for later in (*(term for term, each in held.items() if each.after_loading), "checkpoint"):
            loading = loading - terms[later]
        terms["loading"] = np.maximum(loading, 0.0)
    return {name: np.rint(column) for name, column in terms.items()}


def _bytes(held: HostBytes, node: HostNode) -> FloatColumn:
    pinned = [_pinned(total, piece, node) for total, piece in held.pinned]
    return held.pageable + reduce(np.add, pinned) if pinned else held.pageable


def _pinned(total: FloatColumn, piece: FloatColumn, node: HostNode) -> FloatColumn:
    """Return the page-locked bytes of tensors of `piece` bytes each: PyTorch rounds every pinned block up to a power of
    two (ATen/core/CachingHostAllocator.h). Nothing is pinned where there is no accelerator."""
    if node.resident:
        return total
    size = np.maximum(np.minimum(piece, total), 1.0)
    share, _ = np.frexp(size)  # of the power of two above it, from 1/2 to less than 1
    rounded: FloatColumn = total * np.where(share > 0.5, 1.0, 0.5) / share
    return rounded


def _state_parameters(job: Job, rows: RankColumns, from_stage: int) -> FloatColumn:
    counts = rank_parameters(job, rows)
    sharded = sharded_parameters(job, rows, counts.dense, counts.expert)
    return np.where(rows.layouts.zero_stage >= from_stage, sharded, counts.dense + counts.expert)


def _activations(job: Job, rows: RankColumns, node: HostNode) -> FloatColumn:
    """Return what the device would save without offload, less what it saves with offload."""
    moving = [effect for effect in effects_in_use(job) if effect.moves(job, rows.layouts)]
    if not moving:
        return np.zeros(len(rows))
    here, layouts = job, rows.layouts
    for effect in moving:
        here, layouts = effect.without_moves(here, layouts)
    moved = np.maximum(_kept(here, rows.with_layouts(layouts)) - _kept(job, rows), 0.0)
    for effect in moving:
        moved = effect.waiting(job, rows, moved)
    if not job.facts.host.activations_pinned:
        return moved
    return _pinned(moved, job.facts.layer.activation_bytes * tokens(job, rows) * job.shape.hidden_size, node)


def _kept(job: Job, rows: RankColumns) -> FloatColumn:
    return kept_activations(job, rows) + saved_by_heads(job, rows)


def _data_loader(job: Job, rows: RankColumns) -> FloatColumn:
    """One rank of each tensor-parallel group loads, on the first and the last pipeline rank and that of prediction
    heads. Where samples bring an attention mask, each worker makes it of two fp32 squares; one that is kept is made
    before there are batches (core/datasets/gpt_dataset.py _get_ltor_masks_and_position_ids, core 0.19)."""
    sequence, host = job.workload.sequence_length, job.facts.host
    square = float(sequence) ** 2 if host.loader_mask else 0.0
    sample = BATCH_BYTES_PER_TOKEN * sequence + square
    ready = host.loader_batches * rows.layouts.micro_batch_size * sample
    built, kept = MASK_BYTES_MADE * square * host.loader_workers, square * host.loader_workers
    loader = np.maximum(ready + kept, built) if host.loader_mask_kept else ready + built
    return np.where(loads_batches(job, rows), loader / rows.layouts.tensor, 0.0)


def _checkpoint(job: Job, rows: RankColumns) -> FloatColumn:
    """States that are on the host already are written from there."""
    host, counts = job.facts.host, rank_parameters(job, rows)
    sharded = sharded_parameters(job, rows, counts.dense, counts.expert)
    here = optimizer_on_device(job)
    at_once = np.maximum(host.checkpoint_bytes - job.facts.states.parameter_bytes, 0.0) * here
    at_once += min(host.checkpoint_bytes, job.facts.states.parameter_bytes)
    one_by_one = np.maximum(
        host.checkpoint_parameter_bytes * _state_parameters(job, rows, 3),
        host.checkpoint_state_bytes * _state_parameters(job, rows, 1) * here,
    )
    return np.asarray(at_once * sharded + one_by_one)


def _loading(job: Job, rows: RankColumns, node: HostNode) -> FloatColumn:
    """Return what a process holds of the checkpoint that a training starts from while it is read. States of the
    optimizer and a checkpoint of its own come later and take the same memory; on the first node the first process may
    hold what the others need not."""
    host, stage = job.facts.host, rows.layouts.zero_stage
    parameters = float(count_parameters(job.shape).total)
    each, first = (
        np.asarray(size, dtype=np.float64)[stage] * parameters
        for size in (host.loading_bytes, host.loading_first_bytes)
    )
    return np.asarray(each + first / node.processes)


def node_bytes(terms: Mapping[str, FloatColumn], node: HostNode) -> tuple[int, dict[str, int]]:
    """Return (bytes of a node, the same by term) of one layout, for the rank whose process holds the most."""
    worst = int(np.argmax(np.sum(list(terms.values()), axis=0)))
    by_term = {name: node.processes * int(column[worst]) for name, column in terms.items()}
    return sum(by_term.values()), by_term


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
