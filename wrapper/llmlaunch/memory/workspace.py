"""Workspace: bytes alive beside the saved activations while a layer, the head or the embedding runs backward."""

from __future__ import annotations

from functools import reduce

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.layout import RECOMPUTE_SELECTIVE
from llmlaunch.memory.activations import RECOMPUTED, layer_input
from llmlaunch.memory.adapters import fused_pairs
from llmlaunch.memory.attention_backward import attention_backward
from llmlaunch.memory.compressed import mixing_backward
from llmlaunch.memory.heads import head_rank
from llmlaunch.memory.job import Job, RankColumns, alike_parts, by_recompute, recomputes
from llmlaunch.memory.loss import logits_split, loss_piece, projection, recomputed_head, table_gradient, table_sum
from llmlaunch.memory.saved import (
    gathered_tokens,
    kept_operators,
    projected_bytes,
    routed_tokens,
    saved_by_dense_layer,
    saved_by_mixture_layer,
    sequence_split,
    tokens,
)
from llmlaunch.memory.schedule import in_flight
from llmlaunch.memory.vision import encoder_backward
from llmlaunch.memory.weights import distinct_matrices, matrices, vocabulary

__all__ = [
    "adapted_forward",
    "embedding_backward",
    "head_backward",
    "layer_backward",
    "mixture_forward",
    "passing_buffers",
    "recomputed_layer",
    "recorded_gathers",
    "weight_gradient_stubs",
]

FP32_BYTES = 4.0


def layer_backward(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the gradients alive while one layer runs backward, beyond the saved tensors they replace.

    The MLP comes first. Its steps, in turn: the second linear (gradient of its output and of its input), the
    activation function (gradients of both sides; the saved input of the second linear is gone), the first linear
    (gradient of its input, and of its weight where that is not accumulated in place). The gradient of the residual
    stream lives through all of it, twice where it branches; in eager autograd it is also the gradient of the block's
    output. A chunked MLP does so one piece of the sequence after the other (MsT, Luo et al. 2024, section 3.2;
    megatron/core/transformer/transformer_layer.py _forward_mlp, core 0.19).
    """
    shape, e = job.shape, job.facts.activation_bytes
    n, split, t = tokens(job, rows), sequence_split(job, rows), rows.tensor
    more = shape.hidden_size if job.facts.branch_gradients_apart else 0
    stream = e * n * (shape.stream_width + more) / split
    piece = 1.0 / job.techniques.mlp_chunks
    width = n * shape.ffn_hidden_size / t * piece
    dense = _mlp_backward(job, n, width, n * shape.hidden_size, matrices(job, rows).dense) + _recomputed_piece(
        job, width
    )
    attention, shares = np.maximum(attention_backward(job, rows), mixing_backward(job, n)), rows.shares
    if shape.mamba is not None:  # whose layers are not all followed by an MLP
        dense = np.where(shares["mlp"] > 0, dense, 0.0) if shares is not None and "mlp" in shares else 0.0 * dense
    if shape.moe is None:
        return np.asarray(stream + np.maximum(np.maximum(dense, attention), _unfused_norm_backward(job, rows)))
    routed = routed_tokens(job, rows)
    inputs = routed * shape.expert_width * rows.layouts.expert_tensor
    expert_width = routed * shape.moe.ffn_hidden_size * piece
    expert = _mlp_backward(job, n, expert_width, inputs, matrices(job, rows).expert, _activation_recomputed(job, rows))
    # an exchange holds the permuted copy, the exchanged one and the sorted one (traced); where tokens are gathered, the
    # permuted copy and one of all of them
    gathered = gathered_tokens(job, rows)
    exchange = e * shape.expert_width * np.where(gathered > 0, routed + gathered, 3.0 * routed)
    mixture = np.maximum(expert, exchange)
    dense, mixture = np.where(rows.dense_layers > 0, dense, 0.0), np.where(rows.moe_layers > 0, mixture, 0.0)
    return np.asarray(stream + np.maximum(np.maximum(dense, mixture), attention))


def _unfused_norm_backward(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the fp32 temporaries of an unfused norm's backward pass, beyond what the MLP behind it has surely saved
    and let go of by then: one computed in pieces has saved its input alone (deepspeed/runtime/sequence_parallel/
    ulysses_sp.py SequenceTiledCompute.forward, 0.19.8; traced)."""
    facts, n = job.facts, tokens(job, rows)
    saved = 2.0 * facts.activation_bytes * n * job.shape.ffn_hidden_size / rows.tensor
    if facts.mlp_chunks_recomputed and job.techniques.mlp_chunks > 1:
        saved = facts.activation_bytes * n * job.shape.hidden_size / sequence_split(job, rows)
    return np.asarray(facts.norm_backward_bytes * n * job.shape.hidden_size / sequence_split(job, rows) - saved)


def mixture_forward(job: Job, rows: RankColumns) -> FloatColumn | float:
    """Return the tokens on their way to the experts and back, which stay alive until all of that is done: permuted,
    exchanged, output by the experts, and sorted again where there are several; before that, where experts have biases,
    the output with its bias, expert by expert and put together; over expert-tensor ranks this rank's part of the sum,
    and where the router computes in fp32 a copy of all their tokens in that type. The shared expert's output comes on
    top, and what experts take in where they are frozen and nothing keeps it. DeepEP makes what it received, at most
    every routed copy, and permutes it, and both again behind the experts; HybridEP sends from and to its buffers
    (megatron/core/transformer/moe/token_dispatcher.py MoEAlltoAllTokenDispatcher, core 0.19; traced)."""
    moe, lay, facts, e = job.shape.moe, rows.layouts, job.facts, job.facts.activation_bytes
    flex = job.techniques.token_dispatcher == "flex"
    if moe is None or not facts.exchanges_held or job.techniques.token_dispatcher == "allgather":
        return 0.0
    routed, over = routed_tokens(job, rows), (lay.expert_tensor > 1) & (not flex)
    gathered = routed * lay.expert_tensor
    sorts = moe.num_experts > lay.expert
    output = 3.0 if job.shape.linear_bias else 1.0 + sorts
    narrow = routed * (1.0 + (lay.expert > 1)) + gathered * output
    if flex:
        narrow = gathered * (2.0 if job.techniques.flex_backend == "hybridep" else 4.0)
    shared = tokens(job, rows) / sequence_split(job, rows) * (moe.shared_expert_ffn_hidden_size > 0)
    adapters = job.techniques.adapters
    narrow = narrow + gathered * (adapters is not None and "up_proj" not in adapters.targets)
    wide = FP32_BYTES * (gathered + routed) if moe.num_experts >= facts.fp32_router_experts else e * routed
    exchange_bytes = job.shape.expert_width * (e * narrow + wide * over) + e * job.shape.hidden_size * shared
    return np.where(rows.moe_layers > 0, exchange_bytes, 0.0)


def adapted_forward(job: Job, rows: RankColumns) -> FloatColumn | float:
    """Return what the MLP's linears add in the last layer's forward pass, beside all that is saved: what the frozen
    matrix puts out, what the adapter does, before and after it is scaled, and their sum, which is saved of the first
    linear, while there is no input of the second yet (megatron/bridge/peft/lora_layers.py LoRALinear.forward,
    Megatron-Bridge 0.6). Over tensor ranks the second adapter gathers its columns, which then are put together
    (megatron/core/tensor_parallel/mappings.py _gather_along_last_dim, core 0.19). The tokens of experts are there
    permuted and exchanged, too, and an activation that is computed again is still there (traced)."""
    adapters, e, shape = job.techniques.adapters, job.facts.activation_bytes, job.shape
    if adapters is None or not job.facts.adapters_fused:
        return 0.0
    targets = adapters.fused_targets(shape.gated_mlp) or ()
    first, second = float("linear_fc1" in targets), float("linear_fc2" in targets)
    each = first * (2.0 * (2.0 if shape.gated_mlp else 1.0) - second)
    n, t = tokens(job, rows), rows.tensor
    columns = np.where(t > 1, 1.0 / sequence_split(job, rows) + 1.0 / t + 2.0, 3.0)
    dense = e * n * np.maximum(each * shape.ffn_hidden_size / t, second * shape.hidden_size * columns)
    if shape.moe is None:
        return np.asarray(dense)
    routed, outer, width = routed_tokens(job, rows), shape.expert_width, shape.moe.ffn_hidden_size
    again = width * _activation_recomputed(job, rows)
    own = np.maximum(each * width, second * (3.0 * outer + again))
    mixture = e * routed * (own + np.where(own > 0, outer * (1.0 + (rows.layouts.expert > 1)), 0.0))
    return np.maximum(np.where(rows.dense_layers > 0, dense, 0.0), np.where(rows.moe_layers > 0, mixture, 0.0))


def embedding_backward(job: Job, rows: RankColumns, activations: FloatColumn) -> FloatColumn:
    """Return for the first rank the gradient of the embedding table, which is whole before it is added to the buffer,
    and of its output, less what the chunk before it has just freed (`activations` are those of all micro-batches in
    flight). It runs last of its micro-batch, while other micro-batches are kept (traced, core 0.19.2: tables of 1 GiB
    beside chunks of one layer, where this is the peak). A vision encoder runs backward behind it. It is zero without a
    table to train and an encoder."""
    table, encoder = table_gradient(job, rows), encoder_backward(job, rows)
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
    first = (rows.dense_layers + rows.moe_layers) / v
    if np.any(lay.uneven):
        of_partition = np.array([split[0] if split else 0 for split in lay.partitions], dtype=np.float64)
        first = np.where(lay.uneven, of_partition[lay.partition], first)
    alive_layers = np.maximum(alive.dense + alive.mixture, 1.0)
    chunks = alive.depth * v
    replaced = np.where(v > 1, m * v - (v - 1) * g, chunks)
    return np.asarray(np.minimum(first / alive_layers + np.maximum(chunks - replaced, 0.0) / chunks, 1.0))


def _activation_recomputed(job: Job, rows: RankColumns) -> FloatColumn | float:
    """Return 1 where experts' activations are recomputed, which keeps them until the activation has run backward
    (megatron/core/tensor_parallel/random.py CheckpointWithoutOutput, core 0.19; traced)."""
    recompute = recomputes(job, rows.layouts, "moe_act")
    if not np.any(recompute):
        return 0.0
    return np.where((rows.layouts.recompute == RECOMPUTE_SELECTIVE) & recompute, 1.0, 0.0)


def _mlp_backward(
    job: Job,
    n: FloatColumn,
    width: FloatColumn,
    hidden: FloatColumn,
    matrix: tuple[FloatColumn, FloatColumn],
    outliving: FloatColumn | float = 0.0,
) -> FloatColumn:
    """Return the bytes alive at the worst step of an MLP's backward pass. `width` and `hidden` are elements of one
    ffn-wide and one hidden-wide tensor, `matrix` those of both weights; `outliving` is the share of the second linear's
    input that outlives its backward."""
    e, w = job.facts.activation_bytes, job.facts.linear_input_bytes * _inputs_kept(job)
    projected = 2.0 if job.shape.gated_mlp else 1.0
    no_temporary = job.facts.weight_gradient_fused or job.techniques.adapters is not None
    first, second = (0.0 if no_temporary else job.facts.parameter_bytes * m for m in matrix)
    output = hidden if job.facts.branch_gradients_apart else 0.0
    second_linear = e * (output + width) + second
    created = 0.0 if job.facts.gated_gradient_in_place and job.shape.gated_mlp else projected
    saved_input = w * width
    activation = e * (1.0 + created) * width - saved_input * (1.0 - outliving)
    first_linear = e * (projected * width + hidden) + first - saved_input - e * projected * width
    return np.maximum(second_linear, np.maximum(activation, first_linear))


def _inputs_kept(job: Job) -> float:
    """Return the share of the input of an MLP's second linear that is saved, and freed once its weight gradient is
    computed."""
    adapters = job.techniques.adapters
    if adapters is not None and (adapters.frozen_down or "down_proj" not in adapters.targets):
        return 0.0
    return job.techniques.sampled_share


def _recomputed_piece(job: Job, width: FloatColumn) -> FloatColumn | float:
    """Return what one piece of a chunked MLP saves while it is recomputed."""
    if job.techniques.mlp_chunks == 1 or not job.facts.mlp_chunks_recomputed:
        return 0.0
    return (projected_bytes(job) + job.facts.linear_input_bytes) * width


def recomputed_layer(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the activations recomputed before a layer's backward pass: all of the layer with full recompute, those of
    its modules with selective recompute, and the scores with either.

    With the block method the layers saved whole are the last ones and run backward first: what they free is available
    to the first recomputed layer.
    """

    def full() -> FloatColumn:
        whole = _whole_layer(job, rows) - layer_input(job, rows)  # which is kept already
        whole = whole + recomputed_head(job, rows)
        count = rows.layouts.recompute_layers
        if job.techniques.recompute_method == "uniform":
            return whole * np.maximum(count, 1)
        layers = (rows.dense_layers + rows.moe_layers) / rows.layouts.virtual_pipeline
        return whole * np.where(count == 0, 1.0, np.clip(1.0 + count - layers, 0.0, 1.0))

    return by_recompute(rows, lambda: np.zeros(len(rows)), lambda: _recomputed_modules(job, rows), full)


def _whole_layer(job: Job, rows: RankColumns) -> FloatColumn:
    """Return all that the largest layer of a row's rank saves."""
    return reduce(np.maximum, (_whole_mean_layer(job, alike) for alike in alike_parts(job, rows)))


def _whole_mean_layer(job: Job, rows: RankColumns) -> FloatColumn:
    dense = saved_by_dense_layer(job, rows).total
    if job.shape.moe is None:
        return dense
    mixture = np.maximum(dense * (rows.dense_layers > 0), saved_by_mixture_layer(job, rows).total)
    return np.where(rows.moe_layers > 0, mixture, dense)


def _recomputed_modules(job: Job, rows: RankColumns) -> FloatColumn:
    """Return what selective recompute recomputes of one layer."""
    if job.facts.operators_kept:
        return _recomputed_operators(job, rows)
    lay, dense = rows.layouts, saved_by_dense_layer(job, rows)
    part = np.zeros(len(rows))
    if np.any(mlp := recomputes(job, lay, "mlp")):
        part = np.where((rows.dense_layers > 0) & mlp, dense.of("mlp_norm_output", *RECOMPUTED["mlp"]), 0.0)
    for name in ("moe", "moe_act") if job.shape.moe is not None else ():  # the activation is part of the experts
        if np.any(module := recomputes(job, lay, name)):
            mixture = saved_by_mixture_layer(job, rows).of(*RECOMPUTED[name])
            part = np.maximum(part, np.where((rows.moe_layers > 0) & module, mixture, 0.0))
    return dense.of("attn_scores") + part


def _recomputed_operators(job: Job, rows: RankColumns) -> FloatColumn:
    """Return what selective recompute by operator recomputes of the layer that saves most."""
    dense = saved_by_dense_layer(job, rows).total - kept_operators(job, rows, job.shape.ffn_hidden_size)
    if job.shape.moe is None:
        return dense
    shared = job.shape.moe.shared_expert_ffn_hidden_size
    mixture = saved_by_mixture_layer(job, rows).total - kept_operators(job, rows, shared)
    return np.maximum(np.where(rows.dense_layers > 0, dense, 0.0), np.where(rows.moe_layers > 0, mixture, 0.0))


def head_backward(job: Job, rows: RankColumns) -> FloatColumn:
    """Return for the last rank the gradients of the logits, of the head's gathered input, and of its weight."""
    n, t = tokens(job, rows), rows.tensor
    head = matrices(job, rows).head
    wide = vocabulary(job, rows) / logits_split(job, rows)
    logits = n * loss_piece(job, rows) * job.facts.logit_gradient_bytes * wide
    no_temporary = job.facts.weight_gradient_fused or job.techniques.adapters is not None
    weight = 0.0 if no_temporary else job.facts.parameter_bytes * head
    if job.facts.fused_loss is not None:
        weight = job.facts.fused_loss.kept_weight_bytes * head
    gathered = job.facts.activation_bytes * n * job.shape.hidden_size * (1.0 + 1.0 / t)
    return np.where(rows.last, logits + weight + gathered, 0.0)


def weight_gradient_stubs(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the stubs of weight gradients. With gradients accumulated in place, Transformer Engine hands autograd one
    stub for every distinct shape of weight (transformer_engine/pytorch/module/base.py get_dummy_wgrad, 2.2 to 2.20) and
    Megatron core one for the head (megatron/core/tensor_parallel/layers.py, core 0.19). They are made once and kept.
    Frozen weights have none: with adapters they are those of the adapters, of which few are alike."""
    if not (job.facts.weight_gradient_fused and job.facts.weight_gradient_stubs):
        return np.zeros(len(rows))
    if job.techniques.adapters is not None and job.facts.adapters_fused:
        layer, experts = fused_pairs(job, rows)
        kinds = (layer[0], rows.dense_layers), (layer[1] + experts, rows.moe_layers)
        return job.facts.parameter_bytes * reduce(np.maximum, [np.where(count > 0, each, 0.0) for each, count in kinds])
    return job.facts.parameter_bytes * (distinct_matrices(job, rows) + projection(job, rows))


def passing_buffers(job: Job, rows: RankColumns) -> dict[str, FloatColumn]:
    """Return by name the bytes of buffers that are allocated once and that each micro-batch passes through.

    `user_buffers`: one for every multiplication of a layer that is overlapped with its all-gather or reduce-scatter
    (transformer_engine/pytorch/module/base.py initialize_ub, 2.20; Megatron `--tp-comm-overlap`).
    `sequence_gather`: the largest all-gather of sequence parallelism or of expert parallelism's tokens
    (megatron/core/utils.py GlobalMemoryBuffer); Transformer Engine's linears bring their own, which they free.
    """
    facts, h, n, none = job.facts, job.shape.hidden_size, tokens(job, rows), np.zeros(len(rows))
    buffers = {"user_buffers": none, "sequence_gather": none, "pipeline_buffers": none}
    split = rows.layouts.sequence_parallel > 0
    if facts.user_buffers:
        buffers["user_buffers"] = np.where(split, facts.user_buffers * facts.linear_input_bytes * n * h, 0.0)
    if facts.sequence_gather != "none":
        keeps = split if facts.sequence_gather == "all" else split & rows.last
        gathered = np.maximum(np.where(keeps, n, 0.0), gathered_tokens(job, rows))
        buffers["sequence_gather"] = facts.activation_bytes * h * gathered
    if facts.pipeline_buffers:
        stream = facts.activation_bytes * n * job.shape.stream_width
        if job.techniques.heads_before_loss:  # whose outputs travel to the stage of the loss beside the decoder's
            between = rows.last | (rows.rank == head_rank(job, rows.layouts))
            stream = stream * np.where(between, 1.0 + job.shape.mtp_num_layers, 1.0)
        exchanged = stream / sequence_split(job, rows) * _exchanges(job, rows)
        buffers["pipeline_buffers"] = np.where(rows.layouts.pipeline > 1, exchanged, 0.0)
    return buffers


def recorded_gathers(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes of gathered layer inputs that are free and cannot be reused yet. Sequence parallelism gathers
    the input of the attention and of the MLP of every layer. torch before 2.7 records them as used by NCCL's stream
    (ProcessGroupNCCL.cpp, unless TORCH_NCCL_AVOID_RECORD_STREAMS is set), so they wait until the device has passed
    them; and the host is a forward pass ahead of it."""
    chunk = (rows.dense_layers + rows.moe_layers) / rows.layouts.virtual_pipeline
    gathered = 2.0 * chunk * job.facts.activation_bytes * job.shape.hidden_size * tokens(job, rows)
    return np.where(rows.layouts.sequence_parallel > 0, gathered, 0.0)


def _exchanges(job: Job, rows: RankColumns) -> FloatColumn | float:
    """Return the number of buffers for what pipeline ranks send each other."""
    every = rows.microbatches.astype(np.float64) if job.facts.pipeline_buffers_by_microbatch else 1.0
    return every * job.facts.pipeline_buffers
