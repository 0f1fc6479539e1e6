"""All terms of a rank's peak, as columns that sum to it.

A device's torch peak is its lasting state plus the larger of two moments: the backward pass with the most activations
alive, and the optimizer step with its temporaries. Each term is what it adds to the peak, so the sum is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from llmlaunch.memory.activations import kept_activations, layer_working_set, loss_bytes
from llmlaunch.memory.job import FloatColumn, Job, RankColumns
from llmlaunch.memory.states import states

__all__ = ["OUTSIDE_TORCH", "Terms", "rank_terms"]

CACHE = "allocator_cache"
OUTSIDE_TORCH = ("context", "communicators")


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
    kept, embedding = kept_activations(job, rows)
    loss, layer = loss_bytes(job, rows), layer_working_set(job, rows)
    # the loss is gone before the layers run backward: only the larger of the two counts
    working = np.maximum(layer - loss, 0.0)
    forward_backward = state.backward + kept + embedding + loss + working
    terms = {
        "parameters": state.parameters,
        "gradients": state.gradients,
        "optimizer_states": state.optimizer,
        "gradient_buffers": state.backward,
        "activations": kept,
        "embedding": embedding,
        "logits_and_loss": loss,
        "working_set": working,
        "optimizer_step": np.maximum(state.step - forward_backward, 0.0),
        "workspace": np.full(len(rows), job.facts.workspace_bytes),
    }
    terms = {name: np.rint(column) for name, column in terms.items()}
    terms[CACHE] = np.rint(job.facts.cache_share * _sum(terms.values()))
    terms["context"] = np.full(len(rows), float(round(job.facts.context_bytes)))
    terms["communicators"] = np.rint(job.facts.communicator_bytes * _groups(rows))
    return Terms(terms)


def _groups(rows: RankColumns) -> FloatColumn:
    """Process groups of more than one rank that a device is in; each may hold a communicator."""
    lay = rows.layouts
    sizes = (lay.tensor, lay.pipeline, lay.context, lay.data, lay.expert)
    count = np.zeros(len(rows))
    for size in sizes:
        count += size > 1
    return count + ((lay.data > 1) & (lay.context > 1))
