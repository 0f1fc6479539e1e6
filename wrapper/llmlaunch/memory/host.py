"""Host memory of a node: what each of its processes keeps there, by term.

A node is priced as if each of its processes were that of the worst pipeline rank: exact where a stage fills the node,
never too low.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.parameters import count_parameters
from llmlaunch.memory.activations import kept_activations, loads_batches
from llmlaunch.memory.effects import Effect, HostBytes, effects_in_use, effects_of, optimizer_on_device
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.loss import saved_by_heads
from llmlaunch.memory.peak import rank_terms
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
