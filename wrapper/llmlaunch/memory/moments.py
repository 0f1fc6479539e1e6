"""What is alive at each moment that can be a rank's peak, by term: transient bytes and model states.

Transient bytes (activations, logits, workspace, buffers as wide as a micro-batch) follow from the split of the model,
the micro-batch, and what is recomputed or offloaded of the activations. Model states (parameters, gradients, optimizer
states, the temporaries of the optimizer step) follow from the split and from how they are sharded or offloaded; of the
micro-batches, only from whether a step has more than one. No term needs both, so a moment's bytes are the sum of two
numbers, and each part is priced once for many layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.facts import MemoryFacts
from llmlaunch.frozen import frozen
from llmlaunch.memory.activations import (
    arriving_mask,
    kept_activations,
    kept_embedding,
    kept_masks,
    largest_layer,
    returned_key_values,
)
from llmlaunch.memory.effects import Effect, effects_of
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.loss import (
    cached_logits,
    embedded_again,
    final_norm,
    logits,
    saved_by_heads,
    step_logits,
    tables_of_heads,
    waiting_logits,
    waiting_table,
)
from llmlaunch.memory.schedule import in_flight
from llmlaunch.memory.states import States
from llmlaunch.memory.workspace import (
    embedding_backward,
    head_backward,
    layer_backward,
    mixture_forward,
    passing_buffers,
    recorded_gathers,
    weight_gradient_stubs,
)

HOLES = "free_pieces"  # a term that goes into the allocator's cache: free, and of no use to what comes next
Moment = Mapping[str, FloatColumn]


@frozen
class MomentTerms:
    """Whole bytes by term. `lasting` is alive from the second step on, whatever the moment. `moments` come on top, in
    the same order for transient bytes and model states: the loss with all activations alive, the backward pass of the
    head, of a layer, of the first layer where gradients come and go within a step, and the optimizer step."""

    lasting: Moment
    moments: tuple[Moment, ...]


def transient_terms(job: Job, rows: RankColumns) -> MomentTerms:
    """Return the transient terms. They read neither the ZeRO stage nor the facts of gradients and optimizer."""
    facts = job.facts
    heads, embedded, norm = saved_by_heads(job, rows), embedded_again(job, rows), final_norm(job, rows)
    activations = kept_activations(job, rows) + heads
    always = {"embedding": kept_embedding(job, rows) + embedded, **_trainer_terms(job, rows)}
    beside = _joined(effect(job, rows) for effect in effects_of(job, Effect.beside_layer))
    # a prediction head's layer is the first to run backward, before the norm of the decoder
    first = {"logits_and_loss": norm} if job.shape.mtp_num_layers else {}
    read = _joined(effect(job, rows) for effect in effects_of(job, Effect.after_the_loss))
    one_layer, waiting = layer_backward(job, rows), waiting_table(job, rows)
    for only in effects_of(job, Effect.layer_backward):
        one_layer = only(job, rows, one_layer)
    backward = np.maximum(one_layer, one_layer + waiting - heads - embedded - sum(first.values()))
    gone = reduce(np.add, beside.values())
    tables = np.maximum(
        embedding_backward(
            job, rows, activations - sum(effect(job, rows) for effect in effects_of(job, Effect.pooled))
        ),
        tables_of_heads(job, rows) - heads / np.maximum(in_flight(job, rows).heads, 1.0),
    )
    later = sum(effect(beside, rows) for effect in effects_of(job, Effect.after_forward))
    mixture = mixture_forward(job, rows) - later
    layer = {**first, **read, "layer_backward": np.maximum(np.maximum(backward, mixture), tables - gone), **beside}
    whole = _Whole()
    alive = {**always, "activations": activations}
    newest = activations / np.maximum(in_flight(job, rows).depth, 1.0)
    every_logit = logits(job, rows)
    at_worst = norm + every_logit + sum(effect(job, rows) for effect in effects_of(job, Effect.beside_logits))
    masks = arriving_mask(job, rows, newest + norm + every_logit)
    at_the_loss = {**alive, **_joined(effect(job, rows) for effect in effects_of(job, Effect.at_the_loss)), **masks}
    alive.update(kept_masks(job, rows))
    free = [cached_logits(job, rows)] if facts.foreign.cached_logit_bytes else []
    free += [recorded_gathers(job, rows)] if facts.exchange.streams_recorded else []
    holes = {HOLES: reduce(np.add, free)} if free else {}
    moments: list[Moment] = [
        {**at_the_loss, "logits_and_loss": at_worst, **holes},
        {**at_the_loss, "logits_and_loss": norm + waiting_logits(job, rows), "head_backward": head_backward(job, rows)},
        {**alive, **layer},
    ]
    if _gradients_come_and_go(facts):
        last_layer = np.minimum(activations, largest_layer(job, rows))
        # of one micro-batch, the embedding's gradient is among those that are all there
        table = np.where(rows.microbatches > 1, embedding_backward(job, rows, last_layer) - gone, 0.0)
        end = {"activations": last_layer, "layer_backward": np.maximum(np.maximum(one_layer + waiting, mixture), table)}
        moments.append({**always, **layer, **end})
    lasting = {
        **passing_buffers(job, rows),
        **_joined(effect(job, rows) for effect in effects_of(job, Effect.lasting)),
        "workspace": np.full(len(rows), facts.allocator.workspace_bytes + _grouped(job)),
    }
    every: Sequence[Moment] = [*moments, {}]
    for around in effects_of(job, Effect.at_moments):
        every = around(job, rows, every, backward + gone, tables)
    return MomentTerms(whole(lasting), tuple(map(whole, every)))


def state_terms(job: Job, rows: RankColumns, state: States) -> MomentTerms:
    """Return the terms of model states. They read neither micro-batch nor recompute, and of `rows.microbatches` only
    whether there is more than one."""
    facts = job.facts
    # none while the only micro-batch of a step runs forward, where the step frees gradients
    before = np.where(facts.foreign.gradients_freed & (rows.microbatches == 1), 0.0, state.gradients)
    gathered = {} if facts.states.full_sharding is None else {"gathered_parameters": state.gathered}
    unreduced = {} if facts.states.full_sharding is None else {"unreduced_gradients": state.unreduced}
    alive = {"gradient_buffers": state.backward, **gathered, "gradients": before}
    moments: list[Moment] = [{**alive, "gradient_buffers": state.forward}, alive, {**alive, **unreduced}]
    if _gradients_come_and_go(facts):
        moments.append({"gradient_buffers": state.final, **gathered, **unreduced, "gradients": state.gradients})
    norm = state.norm >= state.step
    step = {"gradient_norm": np.where(norm, state.norm, 0.0), "optimizer_step": np.where(norm, 0.0, state.step)}
    moments.append({"gradient_buffers": state.buckets, "gradients": state.gradients, **step})
    lasting = {
        "parameters": state.parameters,
        "weight_copies": state.weight_copies,
        "optimizer_states": state.optimizer,
        **_joined(effect(job, rows) for effect in effects_of(job, Effect.lasting_states)),
        "weight_gradient_stubs": weight_gradient_stubs(job, rows),
    }
    whole = _Whole()
    return MomentTerms(whole(lasting), tuple(map(whole, moments)))


def _joined(terms: Iterable[Moment]) -> dict[str, FloatColumn]:
    """Return the terms of all effects."""
    return {name: column for some in terms for name, column in some.items()}


class _Whole:
    """Rounds columns to whole bytes, so that sums are exact; a column of several moments is rounded once and stays one
    column."""

    def __init__(self) -> None:
        self._columns: dict[int, tuple[FloatColumn, FloatColumn]] = {}

    def __call__(self, terms: Moment) -> Moment:
        return {name: self._rounded(column) for name, column in terms.items()}

    def _rounded(self, column: FloatColumn) -> FloatColumn:
        rounded = self._columns.get(id(column))
        if rounded is None:
            rounded = self._columns[id(column)] = (column, np.rint(column))
        return rounded[1]


def _gradients_come_and_go(facts: MemoryFacts) -> bool:
    """Whether gradients live within a step only. Then the first layer's backward pass, the last to run, is a moment of
    its own: all gradients are there, and no more than one layer's activations."""
    return facts.foreign.gradients_freed or facts.zero.gradient_life is not None


def _trainer_terms(job: Job, rows: RankColumns) -> Moment:
    """Return terms of the forward and backward pass that few jobs have."""
    terms = _joined(effect(job, rows) for effect in effects_of(job, Effect.in_passes))
    if job.shape.vision is not None:
        from llmlaunch.memory.vision import encoder_activations

        terms["encoder_activations"] = encoder_activations(job, rows)
    if job.facts.foreign.key_values_returned:
        terms["returned_keys_values"] = returned_key_values(job, rows)
    if job.facts.foreign.step_logits_bytes:
        terms["step_logits"] = step_logits(job, rows)
    return terms


def _grouped(job: Job) -> float:
    moe = job.shape.moe
    return job.facts.allocator.grouped_workspace_bytes if moe is not None and moe.grouped_gemm is not False else 0.0
