"""Workspace: bytes alive beside the saved activations while a layer, the head or the embedding runs backward."""

from __future__ import annotations

from functools import partial, reduce

import numpy as np

from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.layers.model import model_of
from llmlaunch.memory.activations import kept_by_kind
from llmlaunch.memory.answers import once_for_splits
from llmlaunch.memory.effects import Effect, effects_of, trains_head
from llmlaunch.memory.job import Job, RankColumns, chunk_ranges, head_rank
from llmlaunch.memory.layer_bytes import layers_of
from llmlaunch.memory.loss import logits_share, logits_split, projection, table_gradient, table_sum
from llmlaunch.memory.schedule import in_flight
from llmlaunch.memory.tokens import layer_input, sequence_split, tokens
from llmlaunch.memory.weights import distinct_matrices, head_matrix, vocabulary


def layer_backward(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the gradients alive while one layer runs backward, beyond the saved tensors they replace: those of its
    worst block, and of the layer that has most. The gradient of the residual stream lives through all of it, twice
    where it branches; in eager autograd it is also the gradient of the block's output."""
    layers = layers_of(job, rows)
    c, hidden = layers.columns, job.shape.hidden_size
    more = hidden if job.facts.layer.branch_gradients_apart else 0
    stream = job.facts.layer.activation_bytes * c.tokens * (job.shape.stream_width + more) / c.sequence_split
    backward = layers.backward(partial(_last_kind, job, rows), kept_by_kind(job, rows))
    return np.asarray(layers.of_ranks(stream) + rows.most_of(backward))


@once_for_splits
def _last_kind(job: Job, rows: RankColumns) -> IntColumn:
    """Return the kind of the last layer that each row's rank holds."""
    model = model_of(job.shape)
    stops = [stop for _, stop in chunk_ranges(len(model.order), rows.layouts, rows.rank)]
    last: IntColumn = np.array(model.order)[np.maximum(reduce(np.maximum, stops), 1) - 1]
    return last


def mixture_forward(job: Job, rows: RankColumns) -> FloatColumn:
    """Return what the last layer's forward pass has alive beside all that is saved, of the layer that has most: tokens
    on their way to experts, and what adapters add."""
    return rows.most_of(layers_of(job, rows).forward())


def embedding_backward(job: Job, rows: RankColumns, activations: FloatColumn) -> FloatColumn:
    """Return for the first rank the gradient of the embedding table, which is whole before it is added to the buffer,
    and of its output, less what the chunk before it has just freed (`activations` are those of all micro-batches in
    flight). It runs last of its micro-batch, while other micro-batches are kept (traced, core 0.19.2: tables of 1 GiB
    beside chunks of one layer, where this is the peak). A vision encoder runs backward behind it. It is zero without a
    table to train and an encoder."""
    table, encoder = table_gradient(job, rows), np.zeros(len(rows))
    if job.shape.vision is not None:
        from llmlaunch.memory.vision import encoder_backward

        encoder = encoder_backward(job, rows)
    if not np.any(table) and not np.any(encoder):
        return np.zeros(len(rows))
    gradients = np.maximum(table + table_sum(job, rows) + layer_input(job, rows), encoder)
    return np.where(rows.first, gradients - activations * _freed_by_first_chunk(job, rows), 0.0)


def _freed_by_first_chunk(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the share of the activations in flight that is freed when the first chunk has run backward once.

    An interleaved schedule runs it after a group's backward passes of each other chunk; where no forward passes are
    left to take their places, theirs are gone too (`in_flight` says how many chunks are alive at most)."""
    lay, alive = rows.layouts, in_flight(job, rows)
    v, m, g = (
        lay.virtual_pipeline,
        rows.microbatches,
        lay.pipeline if job.microbatch_group is None else job.microbatch_group,
    )
    first = rows.layers / v
    if np.any(lay.uneven):
        of_partition = np.array([split[0] if split else 0 for split in lay.partitions], dtype=np.float64)
        first = np.where(lay.uneven, of_partition[lay.partition], first)
    alive_layers = np.maximum(alive.layers, 1.0)
    chunks = alive.depth * v
    replaced = np.where(v > 1, m * v - (v - 1) * g, chunks)
    return np.asarray(np.minimum(first / alive_layers + np.maximum(chunks - replaced, 0.0) / chunks, 1.0))


def head_backward(job: Job, rows: RankColumns) -> FloatColumn:
    """Return for the last rank the gradients of the logits, of the head's gathered input, and of its weight."""
    n, t = tokens(job, rows), rows.tensor
    head = head_matrix(job, rows)
    wide = vocabulary(job, rows) / logits_split(job, rows)
    logits = n * logits_share(job, rows) * job.facts.loss.logit_gradient_bytes * wide
    no_temporary = job.facts.layer.weight_gradient_fused or not trains_head(job)
    weight = 0.0 if no_temporary else job.facts.states.parameter_bytes * head
    if job.facts.loss.fused_loss is not None:
        weight = job.facts.loss.fused_loss.kept_weight_bytes * head
    gathered = job.facts.layer.activation_bytes * n * job.shape.hidden_size * (1.0 + 1.0 / t)
    return np.where(rows.last, logits + weight + gathered, 0.0)


def weight_gradient_stubs(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the stubs of weight gradients. With gradients accumulated in place, Transformer Engine hands autograd one
    stub for every distinct shape of weight (transformer_engine/pytorch/module/base.py get_dummy_wgrad, 2.2 to 2.20) and
    Megatron core one for the head (megatron/core/tensor_parallel/layers.py, core 0.19). They are made once and kept."""
    if not (job.facts.layer.weight_gradient_fused and job.facts.layer.weight_gradient_stubs):
        return np.zeros(len(rows))
    elements = distinct_matrices(job, rows) + projection(job, rows)
    for effect in effects_of(job, Effect.stubs):
        elements = effect(job, rows, elements)
    return job.facts.states.parameter_bytes * elements


def passing_buffers(job: Job, rows: RankColumns) -> dict[str, FloatColumn]:
    """Return by name the bytes of buffers that are allocated once and that each micro-batch passes through.

    `user_buffers`: one for every multiplication of a layer that is overlapped with its all-gather or reduce-scatter
    (transformer_engine/pytorch/module/base.py initialize_ub, 2.20; Megatron `--tp-comm-overlap`).
    `sequence_gather`: the largest all-gather of sequence parallelism or of expert parallelism's tokens
    (megatron/core/utils.py GlobalMemoryBuffer); Transformer Engine's linears bring their own, which they free.
    """
    layer, exchange = job.facts.layer, job.facts.exchange
    h, n, none = job.shape.hidden_size, tokens(job, rows), np.zeros(len(rows))
    buffers = {"user_buffers": none, "sequence_gather": none, "pipeline_buffers": none}
    split = rows.layouts.sequence_parallel > 0
    if exchange.user_buffers:
        buffers["user_buffers"] = np.where(split, exchange.user_buffers * layer.linear_input_bytes * n * h, 0.0)
    if exchange.sequence_gather != "none":
        keeps = split if exchange.sequence_gather == "all" else split & rows.last
        gathered = np.maximum(np.where(keeps, n, 0.0), _gathered_tokens(job, rows))
        buffers["sequence_gather"] = layer.activation_bytes * h * gathered
    if exchange.pipeline_buffers:
        stream = layer.activation_bytes * n * job.shape.stream_width
        if job.techniques.heads_before_loss:  # whose outputs travel to the stage of the loss beside the decoder's
            between = rows.last | (rows.rank == head_rank(job, rows.layouts))
            stream = stream * np.where(between, 1.0 + job.shape.mtp_num_layers, 1.0)
        exchanged = stream / sequence_split(job, rows) * _exchanges(job, rows)
        buffers["pipeline_buffers"] = np.where(rows.layouts.pipeline > 1, exchanged, 0.0)
    return buffers


def _gathered_tokens(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the tokens that a device holds at once where the dispatcher gathers those of all expert ranks."""
    layers = layers_of(job, rows)
    mixtures = (layer.mixture for layer in layers.model.kinds)
    gathered = [0.0 if mixture is None else mixture.gathered_tokens(layers.columns) for mixture in mixtures]
    return rows.most_of(layers.by_group(gathered))


def recorded_gathers(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes of gathered layer inputs that are free and cannot be reused yet. Sequence parallelism gathers
    the input of every branch of every layer. torch before 2.7 records them as used by NCCL's stream
    (ProcessGroupNCCL.cpp, unless TORCH_NCCL_AVOID_RECORD_STREAMS is set), so they wait until the device has passed
    them; and the host is a forward pass ahead of it."""
    layers = layers_of(job, rows)
    branches = rows.sum_of(layers.by_group([float(len(layer.branches)) for layer in layers.model.kinds]))
    each = job.facts.layer.activation_bytes * job.shape.hidden_size * tokens(job, rows)
    gathered = branches / rows.layouts.virtual_pipeline * each
    return np.where(rows.layouts.sequence_parallel > 0, gathered, 0.0)


def _exchanges(job: Job, rows: RankColumns) -> FloatColumn | float:
    """Return the number of buffers for what pipeline ranks send each other."""
    every = rows.microbatches.astype(np.float64) if job.facts.foreign.pipeline_buffers_by_microbatch else 1.0
    return every * job.facts.exchange.pipeline_buffers
