"""All terms of a rank's peak, as columns that sum to it.

A device's torch peak is its lasting state plus the worst of a few moments: the loss with all activations alive, the
backward pass of the head, that of a layer, and the optimizer step with its temporaries. The terms of the worst moment
are the terms of the rank, so the sum is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from llmlaunch.memory.activations import kept_activations, kept_embedding
from llmlaunch.memory.communicators import communicators
from llmlaunch.memory.job import FloatColumn, Job, RankColumns
from llmlaunch.memory.loss import final_norm, logits
from llmlaunch.memory.states import States, states
from llmlaunch.memory.working import head_backward, layer_backward, persistent_buffers, recomputed_layer

__all__ = ["OUTSIDE_TORCH", "Terms", "rank_terms"]

CACHE = "allocator_cache"
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
    total: FloatColumn = np.sum(list(columns), axis=0)
    return total


def rank_terms(job: Job, rows: RankColumns) -> Terms:
    """Bytes by term for every row, rounded to whole bytes so that sums are exact."""
    state = states(job, rows)
    alternatives = moments(job, rows, state)
    terms = {**_lasting(job, rows, state), **_worst(alternatives)}
    terms = {name: np.rint(column) for name, column in terms.items()}
    terms[CACHE] = np.rint(_cache_share(job) * _sum(terms.values()) + _flat_step_apart(job, state, alternatives))
    terms["context"] = np.full(len(rows), float(round(job.facts.context_bytes)))
    terms["communicators"] = np.rint(communicators(job, rows))
    return Terms(terms)


def _cache_share(job: Job) -> float:
    mixture = job.facts.mixture_cache_share
    return job.facts.cache_share if mixture is None or job.shape.moe is None else mixture


def _lasting(job: Job, rows: RankColumns, state: States) -> Moment:
    """What is there from the second step on, whatever runs."""
    return {
        "parameters": state.parameters,
        "weight_copies": state.weight_copies,
        "gradients": state.gradients,
        "optimizer_states": state.optimizer,
        **persistent_buffers(job, rows),
        "workspace": np.full(len(rows), job.facts.workspace_bytes + _grouped(job)),
    }


def _grouped(job: Job) -> float:
    moe = job.shape.moe
    return job.facts.grouped_workspace_bytes if moe is not None and moe.grouped_gemm is not False else 0.0


def moments(job: Job, rows: RankColumns, state: States) -> tuple[Moment, ...]:
    """What is alive beside the lasting state at each moment that can be the peak, by term."""
    kept = {
        "activations": kept_activations(job, rows),
        "embedding": kept_embedding(job, rows),
        "gradient_buffers": state.backward,
    }
    norm = final_norm(job, rows)
    return (
        {**kept, "logits_and_loss": norm + logits(job, rows)},
        {**kept, "logits_and_loss": norm, "head_backward": head_backward(job, rows)},
        {**kept, "layer_backward": layer_backward(job, rows), "recomputed_layer": recomputed_layer(job, rows)},
        {"gradient_norm": state.norm},
        {"optimizer_step": state.step},
    )


def _flat_step_apart(job: Job, state: States, alternatives: tuple[Moment, ...]) -> FloatColumn:
    """What the allocator reserves beyond the worst moment where the step's temporaries are single large tensors.

    Freed blocks merge only inside the segment they were cut from (c10/cuda/CUDACachingAllocator.cpp, free_block,
    without expandable segments), so blocks of the size of a layer's tensors never make room for one tensor of the size
    of the rank's gradients: its segments lie beside those of the backward pass.
    """
    totals = np.array([_sum(moment.values()) for moment in alternatives])
    if not job.facts.flat_step:
        return np.zeros(totals.shape[1])
    backward = totals[:-2].max(axis=0)
    apart: FloatColumn = np.maximum(backward + state.flat - totals.max(axis=0), 0.0)
    return apart


def _worst(alternatives: tuple[Moment, ...]) -> Moment:
    """Of every row, the moment with the most bytes; the first of equals."""
    worst = np.argmax([_sum(moment.values()) for moment in alternatives], axis=0)
    names = dict.fromkeys(name for moment in alternatives for name in moment)
    zero = np.zeros(len(worst))
    return {
        name: np.choose(worst, [np.asarray(moment.get(name, zero), dtype=np.float64) for moment in alternatives])
        for name in names
    }
