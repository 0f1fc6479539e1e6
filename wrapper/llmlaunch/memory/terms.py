"""All terms of a rank's peak, as columns that sum to it.

A device's torch peak is its lasting state plus the worst of a few moments: the loss with all activations alive, the
backward pass of the head, that of a layer, and the optimizer step with its temporaries. The terms of the worst moment
are the terms of the rank, so the sum is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from llmlaunch.memory.activations import cut_checkpoints, kept_activations, kept_embedding, returned_key_values
from llmlaunch.memory.communicators import communicators
from llmlaunch.memory.job import FloatColumn, Job, RankColumns
from llmlaunch.memory.loss import cached_logits, final_norm, logits, step_logits
from llmlaunch.memory.states import States, states, weight_versions
from llmlaunch.memory.working import (
    delayed_weight_gradients,
    head_backward,
    layer_backward,
    persistent_buffers,
    recomputed_layer,
)

__all__ = ["OUTSIDE_TORCH", "Terms", "rank_terms"]

CACHE = "allocator_cache"
HOLES = "cached_logits"  # of a moment: goes into the cache
STATE = ("parameters", "weight_copies", "gradients", "optimizer_states")  # shown first, whatever moment is the worst
OUTSIDE_TORCH = ("context", "communicators")
Moment = Mapping[str, FloatColumn]


@dataclass(frozen=True)
class Terms:
    """Columns of bytes by term. allocated <= reserved <= device."""

    terms: Mapping[str, FloatColumn]

    @property
    def allocated(self) -> FloatColumn:
        return _sum(c for n, c in self.terms.items() if n != CACHE and n not in OUTSIDE_TORCH)

    @property
    def reserved(self) -> FloatColumn:
        return self.allocated + self.terms[CACHE]

    @property
    def device(self) -> FloatColumn:
        return self.reserved + _sum(self.terms[n] for n in OUTSIDE_TORCH)


def _sum(columns: Iterable[FloatColumn]) -> FloatColumn:
    return reduce(np.add, columns)


def rank_terms(job: Job, rows: RankColumns) -> Terms:
    """Bytes by term for every row, rounded to whole bytes so that sums are exact."""
    state = states(job, rows)
    alternatives = moments(job, rows, state)
    lasting = _lasting(job, rows, state)
    # a model that lies whole on the device before it is sharded
    start = {"whole_model": np.maximum(state.placed - _sum(lasting.values()), 0.0)}
    terms = {**lasting, **_worst((*alternatives, start))}
    apart = terms.pop(HOLES, 0.0) + _other_streams(job, state, terms)
    apart = apart + _apart(job, rows, state, alternatives, start["whole_model"])
    terms = {name: np.rint(terms[name]) for name in dict.fromkeys((*STATE, *terms))}
    terms[CACHE] = np.rint(_cache_share(job) * _sum(terms.values()) + apart)
    terms["context"] = np.full(len(rows), float(round(job.facts.context_bytes)))
    terms["communicators"] = np.rint(communicators(job, rows))
    return Terms(terms)


def _other_streams(job: Job, state: States, terms: Moment) -> FloatColumn:
    """torch's allocator reuses memory within a stream alone (c10/cuda/CUDACachingAllocator.cpp, 2.13). FSDP gathers
    and reduces on streams of its own, so what it held there stays in the cache when the peak is another moment's."""
    if job.facts.full_sharding is None:
        return np.zeros_like(state.step)
    return state.gradients - terms["gradients"] + state.gathered - terms["gathered_parameters"]


def _cache_share(job: Job) -> float:
    mixture = job.facts.mixture_cache_share
    return job.facts.cache_share if mixture is None or job.shape.moe is None else mixture


def _lasting(job: Job, rows: RankColumns, state: States) -> Moment:
    """What is there from the second step on, whatever runs."""
    return {
        "parameters": state.parameters,
        "weight_copies": state.weight_copies,
        "optimizer_states": state.optimizer,
        **weight_versions(job, rows),
        **persistent_buffers(job, rows),
        "workspace": np.full(len(rows), job.facts.workspace_bytes + _grouped(job)),
    }


def _grouped(job: Job) -> float:
    moe = job.shape.moe
    return job.facts.grouped_workspace_bytes if moe is not None and moe.grouped_gemm is not False else 0.0


def moments(job: Job, rows: RankColumns, state: States) -> tuple[Moment, ...]:
    """What is alive beside the lasting state at each moment that can be the peak, by term."""
    running = {
        "embedding": kept_embedding(job, rows),
        "gradient_buffers": state.backward,
        **_trainers_own(job, rows, state),
    }
    activations = kept_activations(job, rows)
    kept = {**running, "activations": activations, "gradients": _gradients_before_backward(job, rows, state)}
    norm = final_norm(job, rows)
    layer = {
        "layer_backward": layer_backward(job, rows),
        "recomputed_layer": recomputed_layer(job, rows),
        **delayed_weight_gradients(job, rows),
    }
    if job.facts.full_sharding is not None:
        layer["unreduced_gradients"] = state.unreduced
    listed: list[Moment] = [
        {**kept, "gradient_buffers": state.forward, "logits_and_loss": norm + logits(job, rows), **_holes(job, rows)},
        {**kept, "logits_and_loss": norm, "head_backward": head_backward(job, rows)},
        {**kept, **layer},
    ]
    if job.facts.gradients_freed or job.facts.gradient_life is not None:
        # the first layer's backward, the last to run, is a moment of its own
        one = activations / np.maximum(rows.dense_layers + rows.moe_layers, 1.0)
        last = {"gradients": state.gradients, "gradient_buffers": state.final}
        listed.append({**running, **layer, **last, "activations": one})
    listed.append({"gradients": state.gradients, "gradient_norm": state.norm})
    listed.append({"gradients": state.gradients, "optimizer_step": state.step})
    return tuple(listed)


def _trainers_own(job: Job, rows: RankColumns, state: States) -> Moment:
    """Terms of a step's forward and backward pass that few backends have."""
    facts = job.facts
    own = {}
    if facts.full_sharding is not None:
        own["gathered_parameters"] = state.gathered
    if facts.key_values_returned:
        own["returned_keys_values"] = returned_key_values(job, rows)
    if facts.step_logits_bytes:
        own["step_logits"] = step_logits(job, rows)
    return own


def _holes(job: Job, rows: RankColumns) -> Moment:
    return {HOLES: cached_logits(job, rows)} if job.facts.cached_logit_bytes else {}


def _gradients_before_backward(job: Job, rows: RankColumns, state: States) -> FloatColumn:
    """None while the only micro-batch of a step runs forward, where the step frees gradients."""
    return np.where(job.facts.gradients_freed & (rows.microbatches == 1), 0.0, state.gradients)


def _apart(
    job: Job, rows: RankColumns, state: States, alternatives: tuple[Moment, ...], start: FloatColumn
) -> FloatColumn:
    """What the allocator reserves beyond the worst moment because freed blocks are cut for other sizes.

    Freed blocks merge only inside the segment they were cut from (c10/cuda/CUDACachingAllocator.cpp, free_block,
    without expandable segments). Kept layer inputs waste a part of the blocks they are cut from; and blocks of the size
    of a layer's tensors never make room for one tensor of the size of the rank's gradients, so where the step's
    temporaries are single large tensors, their segments lie beside those of the backward pass.
    """
    if not job.facts.flat_step and not job.facts.cut_checkpoints:
        return np.zeros(len(rows))
    totals = np.array([_sum(moment.values()) for moment in alternatives])
    flat = state.flat if job.facts.flat_step else np.zeros(len(rows))
    backward = totals[:-2].max(axis=0) + cut_checkpoints(job, rows) + flat
    apart: FloatColumn = np.maximum(backward - np.maximum(totals.max(axis=0), start), 0.0)
    return apart


def _worst(alternatives: tuple[Moment, ...]) -> Moment:
    """Of every row, the moment with the most bytes; the first of equals."""
    worst = np.argmax([_sum(moment.values()) for moment in alternatives], axis=0)
    rows = [worst == i for i in range(len(alternatives))]
    names = dict.fromkeys(name for moment in alternatives for name in moment)
    zero = np.zeros(len(worst))
    return {name: _by_moment(rows, [moment.get(name, zero) for moment in alternatives]) for name in names}


def _by_moment(rows: Sequence[NDArray[np.bool_]], columns: Sequence[FloatColumn]) -> FloatColumn:
    """Each row's value of the column of its moment. Most terms are the same column at several moments."""
    chosen = columns[0]
    for mine, column in zip(rows[1:], columns[1:], strict=True):
        if column is not columns[0]:
            chosen = np.where(mine, column, chosen)
    return chosen
