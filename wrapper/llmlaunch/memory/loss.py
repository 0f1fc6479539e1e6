"""Logits and loss on the last pipeline rank, the gradients of embedding tables, and multi-token prediction.

A prediction head embeds the tokens, concatenates that with the hidden states, projects both to the hidden size and runs
one more layer like the last; then the outputs of all heads are concatenated with the decoder's, and one loss is
computed after the other (megatron/core/transformer/multi_token_prediction.py, core 0.19; traced). Where heads lie on a
stage before that of the loss, it receives all of these outputs, and takes its inputs as views of them.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from llmlaunch.columns import FloatColumn
from llmlaunch.layers.columns import Size
from llmlaunch.memory.activations import kept_by_heads
from llmlaunch.memory.effects import Column, Effect, effects_of, trains_all, trains_head
from llmlaunch.memory.job import Job, RankColumns, final_norm_rank, head_rank
from llmlaunch.memory.layer_bytes import layers_of
from llmlaunch.memory.schedule import in_flight, last_chunk_in_flight
from llmlaunch.memory.tokens import STATISTIC_BYTES, hidden_bytes, layer_input, sequence_split, tokens
from llmlaunch.memory.weights import tables, vocabulary


def final_norm(job: Job, rows: RankColumns) -> FloatColumn:
    """Return for the last rank what the norm before the head saves (its input) and what the head saves (the norm's
    output, gathered where linears save that), unless it is frozen; and what brings several streams together.
    Where prediction heads lie before it, the norm is not there: the head saves a copy of what the stage receives, which
    the schedule keeps, and still has that of the micro-batch before (transformer_block.py TransformerBlock.forward
    clones what passes no layer, core 0.19; traced)."""
    facts, h, split = job.facts, job.shape.hidden_size, sequence_split(job, rows)
    if job.techniques.heads_before_loss:
        return np.where(rows.last, 3.0 * (1.0 + job.shape.mtp_num_layers) * hidden_bytes(job, rows), 0.0)
    copies = 2.0 if trains_head(job) else 1.0
    per_token = (copies * facts.layer.activation_bytes + facts.layer.norm_extra_bytes) * h + STATISTIC_BYTES
    more = facts.layer.activation_bytes * h * (split - 1.0) if facts.foreign.gathered_inputs_kept else 0.0
    per_token += facts.layer.activation_bytes * _streams(job)
    norm_bytes = tokens(job, rows) * (per_token + more) / split
    return np.where(rows.last, norm_bytes, 0.0)


def _streams(job: Job) -> int:
    """Return the columns of several residual streams, which are brought together before a norm
    (core/transformer/hyper_connection.py learned_output_contract, Megatron-LM d48bd6be); 0 of one."""
    return job.shape.stream_width if job.shape.residual_streams > 1 else 0


def logits_split(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the divisor of the vocabulary in the logits."""
    return np.ones(len(rows)) if job.facts.loss.logits_gathered else rows.tensor


def logits(job: Job, rows: RankColumns) -> FloatColumn:
    """Return for the last rank the logits, what the loss keeps beside them at its worst moment, and what the losses of
    prediction heads before it keep; for a loss fused with the head, also the gradients it has computed by then."""
    t, loss = logits_split(job, rows), job.facts.loss
    per_logit: FloatColumn | float = loss.logit_bytes + waiting_bytes(job)
    if loss.deferred_head_gradients:
        waiting = np.minimum(loss.deferred_head_gradients, rows.microbatches)
        per_logit = per_logit + waiting * loss.logit_gradient_bytes
    alive = tokens(job, rows) * per_logit * vocabulary(job, rows) / t
    alive = alive * logits_share(job, rows)
    fused = loss.fused_loss
    if fused is not None:
        per_hidden = fused.weight_bytes * vocabulary(job, rows) / t + fused.hidden_bytes * tokens(job, rows)
        alive = alive + per_hidden * job.shape.hidden_size
    return np.where(rows.last, alive, 0.0)


def waiting_bytes(job: Job) -> float:
    """Return the bytes per logit that the losses of all prediction heads keep until their backward passes, which come
    after that of the decoder's own head."""
    return job.shape.mtp_num_layers * job.facts.loss.kept_logit_bytes


def waiting_logits(job: Job, rows: RankColumns) -> FloatColumn:
    """Return `waiting_bytes` of all logits, on the last rank."""
    alive = tokens(job, rows) * waiting_bytes(job) * vocabulary(job, rows) / logits_split(job, rows)
    return np.where(rows.last, alive * logits_share(job, rows), 0.0)


def cached_logits(job: Job, rows: RankColumns) -> FloatColumn:
    """Return for the last rank the memory of freed logits that the loss's larger tensors do not fit into."""
    cached = tokens(job, rows) * job.facts.foreign.cached_logit_bytes * vocabulary(job, rows)
    return np.where(rows.last, cached / logits_split(job, rows), 0.0)


def step_logits(job: Job, rows: RankColumns) -> FloatColumn:
    """Return for the last of several ranks the logits of every micro-batch, which the pipeline keeps for the step."""
    t = logits_split(job, rows)
    alive = rows.microbatches * tokens(job, rows) * job.facts.foreign.step_logits_bytes * vocabulary(job, rows) / t
    return np.where(rows.last & (rows.layouts.pipeline > 1), alive, 0.0)


def logits_share(job: Job, rows: RankColumns) -> Size:
    """Return the share of the tokens whose logits exist at a time."""
    share: Size = 1.0
    for effect in effects_of(job, Effect.logits_share):
        share = share * effect(job, rows)
    return share


def logit_piece(job: Job, rows: RankColumns) -> FloatColumn:
    """Return for the last rank the bytes of the widest tensor of logits, which are free once the head has run."""
    bytes_of_logit = max(job.facts.layer.activation_bytes, job.facts.loss.kept_logit_bytes)
    widest = tokens(job, rows) * bytes_of_logit * vocabulary(job, rows) / logits_split(job, rows)
    return np.where(rows.last, widest * logits_share(job, rows), 0.0)


def table_gradient(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes of the gradient of an embedding table; zero without a table to train."""
    states = job.facts.states
    if states.full_sharding or not trains_all(job):
        return np.zeros(len(rows))
    return np.asarray(tables(job, rows)[0] * states.parameter_bytes)


def waiting_table(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the table gradient that waits for another. Without a pipeline, prediction heads and a tied head use the
    decoder's own table: autograd keeps their gradient of it until the decoder's tokens have theirs, and adds in place
    (torch/csrc/autograd/input_buffer.cpp, 2.13; under fake tensors the sum is a third one). A tied head that
    accumulates in place leaves a stub, which takes no bytes."""
    if not (job.shape.mtp_num_layers or (job.shape.tied_embeddings and not _stub(job))):
        return np.zeros(len(rows))
    return np.where(_apart(job, rows), table_gradient(job, rows), 0.0)


def table_sum(job: Job, rows: RankColumns) -> FloatColumn:
    """Return what lies beside the gradient of the decoder's tokens: the gradient that waited, or the sum of both where
    a stub did, which others use as well."""
    if not (job.shape.mtp_num_layers or job.shape.tied_embeddings):
        return np.zeros(len(rows))
    return np.where(_apart(job, rows), table_gradient(job, rows), 0.0)


def _apart(job: Job, rows: RankColumns) -> NDArray[np.bool_]:
    """Whether table gradients meet on one rank, without a pipeline. Where gradients are allocated in every step and it
    has one micro-batch, the waiting gradient becomes the parameter's own and is counted there."""
    alone: NDArray[np.bool_] = rows.first & rows.last
    return alone & (rows.microbatches > 1) if job.facts.foreign.gradients_freed else alone


def _stub(job: Job) -> bool:
    return job.facts.layer.weight_gradient_fused and job.facts.layer.weight_gradient_stubs


def saved_by_heads(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes saved by the heads' layers and what surrounds them, after recompute, of all micro-batches in
    flight.

    The concatenated outputs are there once, that of the decoder among them, unless they are sent on; each head but the
    first keeps its input besides, which is the output of another. Heads before the last stage have the norm behind the
    decoder before them."""
    heads = job.shape.mtp_num_layers
    if not heads:
        return np.zeros(len(rows))
    around = around_head(job, rows)

    def whole() -> FloatColumn:
        return _whole_layers(job, rows) + around

    def as_the_decoder() -> FloatColumn:
        return kept_by_heads(job, rows) + around

    kept: Column = as_the_decoder
    for effect in effects_of(job, Effect.kept_by_head):
        kept = partial(effect, job, rows, kept, whole)
    per_head = kept()
    copies = 1.0 if job.techniques.heads_before_loss else 2.0
    alive = np.where(holds_heads(job, rows), heads * per_head + copies * heads * hidden_bytes(job, rows), 0.0)
    alive = alive * in_flight(job, rows).heads
    return alive if copies > 1.0 else alive + _norm_before_heads(job, rows) + _outputs_to_send(job, rows)


def holds_heads(job: Job, rows: RankColumns) -> NDArray[np.bool_]:
    return np.equal(rows.rank, head_rank(job, rows.layouts))


def _norm_before_heads(job: Job, rows: RankColumns) -> FloatColumn:
    """Return what the norm behind the decoder, which is not on the last rank, saves of all micro-batches in flight: its
    input."""
    saved_bytes = hidden_bytes(job, rows) + tokens(job, rows) * STATISTIC_BYTES / sequence_split(job, rows)
    here = np.equal(rows.rank, final_norm_rank(job, rows.layouts))
    return np.where(here, saved_bytes * last_chunk_in_flight(job, rows), 0.0)


def _outputs_to_send(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the concatenated outputs of the decoder and all heads, which are alive until they are sent."""
    return np.where(holds_heads(job, rows), (1.0 + job.shape.mtp_num_layers) * hidden_bytes(job, rows), 0.0)


def embedded_again(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the embeddings of all heads, each saved by a norm of its own."""
    heads = job.shape.mtp_num_layers
    if not heads:
        return np.zeros(len(rows))
    return np.where(holds_heads(job, rows), heads * hidden_bytes(job, rows) * in_flight(job, rows).heads, 0.0)


def projection(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the elements of the matrix before a head's layer."""
    elements = 2.0 * job.shape.hidden_size**2 / rows.tensor
    return np.where(holds_heads(job, rows) & (job.shape.mtp_num_layers > 0), elements, 0.0)


def tables_of_heads(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the gradients of the table on the rank of the heads, where that is not the first: of one head, or of two
    on the way to their sum. No decoder layer has run backward by then."""
    tables = min(job.shape.mtp_num_layers, 2)
    if not tables:
        return np.zeros(len(rows))
    return np.where(holds_heads(job, rows) & ~rows.first, tables * table_gradient(job, rows), 0.0)


def _whole_layers(job: Job, rows: RankColumns) -> FloatColumn:
    """Return all that the layers of one module save."""
    layers = layers_of(job, rows)
    return layers.predicted(layers.totals)


def around_head(job: Job, rows: RankColumns) -> FloatColumn:
    """The concatenation that is projected; the projection gathered over tensor ranks, of which the layer's input is
    a view; and the input of the norm behind the layer. Several streams are projected one by one, beside the embedding,
    and brought together behind the layer (core/transformer/multi_token_prediction.py, Megatron-LM d48bd6be)."""
    hidden = hidden_bytes(job, rows)
    if _streams(job):
        return 2.0 * hidden * (1.0 + job.shape.residual_streams)
    gathered = hidden * sequence_split(job, rows) - layer_input(job, rows)
    return 3.0 * hidden + gathered
