"""What is alive at each moment that can be a rank's peak, by term, in two halves.

What *runs* (activations, logits, working sets, buffers as wide as a micro-batch) follows from the split of the model,
the micro-batch and what is recomputed or offloaded of the activations. What is *held* (parameters, gradients, optimizer
states, the step's temporaries) follows from the split and from what of the states is sharded or offloaded; of the
micro-batches, only from whether a step has more than one. No term needs both, so a moment's bytes are the sum of two
numbers, and each half of many layouts is worked out once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from llmlaunch.memory.activations import kept_activations, kept_embedding, returned_key_values
from llmlaunch.memory.facts import MemoryFacts
from llmlaunch.memory.job import FloatColumn, Job, RankColumns
from llmlaunch.memory.loss import cached_logits, final_norm, logits, step_logits
from llmlaunch.memory.states import States, weight_versions
from llmlaunch.memory.working import (
    delayed_weight_gradients,
    head_backward,
    layer_backward,
    lone_embedding_backward,
    passing_buffers,
    recomputed_layer,
    weight_gradient_stubs,
)

__all__ = ["HOLES", "Half", "Moment", "held_terms", "running_terms"]

HOLES = "cached_logits"  # of a moment: goes into the cache
Moment = Mapping[str, FloatColumn]


@dataclass(frozen=True)
class Half:
    """Bytes by term, whole ones. `lasting` is there from the second step on, whatever the moment; beside it `moments`,
    in the same order in both halves: the loss with all activations alive, the backward pass of the head, that of a
    layer, that of the first layer where gradients come and go within a step, and the optimizer step."""

    lasting: Moment
    moments: tuple[Moment, ...]


def running_terms(job: Job, rows: RankColumns) -> Half:
    """Reads neither the ZeRO stage nor anything said of gradients and optimizer."""
    facts = job.facts
    activations = kept_activations(job, rows)
    always = {"embedding": kept_embedding(job, rows), **_trainers_own(job, rows)}
    norm = final_norm(job, rows)
    layer = {
        "layer_backward": np.maximum(layer_backward(job, rows), lone_embedding_backward(job, rows)),
        "recomputed_layer": recomputed_layer(job, rows),
        **delayed_weight_gradients(job, rows),
    }
    whole = _Whole()
    kept = {**always, "activations": activations}
    holes = {HOLES: cached_logits(job, rows)} if facts.cached_logit_bytes else {}
    moments: list[Moment] = [
        {**kept, "logits_and_loss": norm + logits(job, rows), **holes},
        {**kept, "logits_and_loss": norm, "head_backward": head_backward(job, rows)},
        {**kept, **layer},
    ]
    if _gradients_come_and_go(facts):
        one = activations / np.maximum(rows.dense_layers + rows.moe_layers, 1.0)
        moments.append({**always, **layer, "activations": one})
    lasting = {
        **passing_buffers(job, rows),
        "workspace": np.full(len(rows), facts.workspace_bytes + _grouped(job)),
    }
    return Half(whole(lasting), (*map(whole, moments), {}))


def held_terms(job: Job, rows: RankColumns, state: States) -> Half:
    """Reads neither micro-batch nor chunks nor recompute; of `rows.microbatches`, whether there is more than one."""
    facts = job.facts
    # none while the only micro-batch of a step runs forward, where the step frees gradients
    before = np.where(facts.gradients_freed & (rows.microbatches == 1), 0.0, state.gradients)
    gathered = {} if facts.full_sharding is None else {"gathered_parameters": state.gathered}
    unreduced = {} if facts.full_sharding is None else {"unreduced_gradients": state.unreduced}
    kept = {"gradient_buffers": state.backward, **gathered, "gradients": before}
    moments: list[Moment] = [{**kept, "gradient_buffers": state.forward}, kept, {**kept, **unreduced}]
    if _gradients_come_and_go(facts):
        moments.append({"gradient_buffers": state.final, **gathered, **unreduced, "gradients": state.gradients})
    norm = state.norm >= state.step
    step = {"gradient_norm": np.where(norm, state.norm, 0.0), "optimizer_step": np.where(norm, 0.0, state.step)}
    moments.append({"gradients": state.gradients, **step})
    lasting = {
        "parameters": state.parameters,
        "weight_copies": state.weight_copies,
        "optimizer_states": state.optimizer,
        **weight_versions(job, rows),
        "weight_gradient_stubs": weight_gradient_stubs(job, rows),
    }
    whole = _Whole()
    return Half(whole(lasting), tuple(map(whole, moments)))


class _Whole:
    """Rounds columns to whole bytes, so that sums are exact; a column of several moments is rounded once and stays one
    column."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[FloatColumn, FloatColumn]] = {}

    def __call__(self, terms: Moment) -> Moment:
        return {name: self._rounded(column) for name, column in terms.items()}

    def _rounded(self, column: FloatColumn) -> FloatColumn:
        known = self._known.get(id(column))
        if known is None:
            known = self._known[id(column)] = (column, np.rint(column))
        return known[1]


def _gradients_come_and_go(facts: MemoryFacts) -> bool:
    """Then the first layer's backward, the last to run, is a moment of its own: all gradients are there, and no more
    than one layer's activations."""
    return facts.gradients_freed or facts.gradient_life is not None


def _trainers_own(job: Job, rows: RankColumns) -> Moment:
    """Terms of a step's forward and backward pass that few backends have."""
    own = {}
    if job.facts.key_values_returned:
        own["returned_keys_values"] = returned_key_values(job, rows)
    if job.facts.step_logits_bytes:
        own["step_logits"] = step_logits(job, rows)
    return own


def _grouped(job: Job) -> float:
    moe = job.shape.moe
    return job.facts.grouped_workspace_bytes if moe is not None and moe.grouped_gemm is not False else 0.0
