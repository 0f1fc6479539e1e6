"""Activations a pipeline rank keeps for backward, and the working sets around them.

The per-layer sum is what a fused Transformer block saves, read off a trace of Megatron core 0.19.2 under fake tensors
(dense, sequence parallel, flash attention): T/t x (12 h + 4 kv + 6 f) elements' worth of bytes at 2 bytes each element,
plus 4 bytes of softmax statistics per head and of norm statistics per token. Korthikanti et al. (2022), section 4,
gives the same list for GPT with dropout and unfused scores.
"""

from __future__ import annotations

import numpy as np

from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_NONE
from llmlaunch.memory.job import FloatColumn, Job, RankColumns
from llmlaunch.memory.weights import largest_matrix, vocabulary
from llmlaunch.models.shape import ModelShape

__all__ = ["in_flight", "kept_activations", "layer_working_set", "loss_bytes"]

ROUTER_BYTES = 4.0  # router logits and probabilities are fp32


def tokens(job: Job, rows: RankColumns) -> FloatColumn:
    """Tokens of one micro-batch on one context-parallel rank."""
    return job.workload.sequence_length * rows.layouts.micro_batch_size / rows.layouts.context


def dropout_mask(shape: ModelShape) -> float:
    """Bytes per token of one hidden dropout's mask: one per hidden element."""
    return float(shape.hidden_size) if shape.hidden_dropout > 0 else 0.0


def sequence_split(rows: RankColumns) -> FloatColumn:
    """What norms, residuals and dropout are divided by: tensor with sequence parallelism, else nothing."""
    return np.where(rows.layouts.sequence_parallel > 0, rows.layouts.tensor, 1).astype(np.float64)


def norm_bytes(job: Job) -> float:
    """Bytes per token a norm keeps: its input, its output, its statistics, and the copies of an unfused one."""
    return (2.0 * job.facts.activation_bytes + job.facts.norm_extra_bytes) * job.shape.hidden_size + 4.0


def _attention(job: Job, rows: RankColumns) -> FloatColumn:
    """Bytes of one attention block for one micro-batch: norm input, its output, Q, K, V, output, statistics."""
    shape, e = job.shape, job.facts.activation_bytes
    t, split, n = rows.layouts.tensor, sequence_split(rows), tokens(job, rows)
    heads = shape.num_attention_heads
    split_by_t: float | FloatColumn
    if shape.mla is not None:
        mla = shape.mla
        query = heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
        value = heads * mla.v_head_dim
        latent = (mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.qk_pos_emb_head_dim
        whole = 2.0 * e * latent  # the latents and their norms' outputs are not split
        split_by_t = e * (2.0 * query + 2.0 * value) + 4.0 * heads
    else:
        groups = np.maximum(shape.num_query_groups, t) * shape.head_dim
        whole = 0.0
        split_by_t = e * (2.0 * shape.query_width + 2.0 * groups) + 4.0 * heads
    return n * ((norm_bytes(job) + dropout_mask(shape)) / split + whole / split + split_by_t / t)


def _scores(job: Job, rows: RankColumns) -> FloatColumn:
    """Bytes of the s x s probabilities of one layer where attention is unfused, with dropout their mask and the dropped
    copy too (Korthikanti et al., section 4.1). Recomputing anything recomputes these."""
    shape, e = job.shape, job.facts.activation_bytes
    if not job.facts.attention_scores_saved:
        return np.zeros(len(rows))
    copies = 2.0 * e + 1.0 if shape.attention_dropout > 0 else e
    return copies * shape.num_attention_heads * tokens(job, rows) * job.workload.sequence_length / rows.layouts.tensor


def _mlp_width_bytes(job: Job) -> float:
    """Bytes per (token x ffn column) an MLP keeps: gate and up and the product, or up and its activation."""
    e = job.facts.activation_bytes
    if not job.shape.gated_mlp:
        return 2.0 * e
    return 3.0 * e if job.facts.gated_activation_fused else 4.0 * e


def _mlp(job: Job, rows: RankColumns, mixture: bool) -> FloatColumn:
    """Bytes of one MLP block for one micro-batch, norm included; a mixture routes topk copies of every token."""
    shape, e = job.shape, job.facts.activation_bytes
    t, split, n = rows.layouts.tensor, sequence_split(rows), tokens(job, rows)
    h = shape.hidden_size
    norm = n * (norm_bytes(job) + dropout_mask(shape)) / split
    if not mixture or shape.moe is None:
        return norm + n * _mlp_width_bytes(job) * shape.ffn_hidden_size / t
    moe = shape.moe
    routed = n * moe.topk / split  # tokens each device's experts see when routing is balanced
    if moe.capacity_factor:
        routed = routed * max(moe.capacity_factor, 0.0)
    # expert-tensor parallelism gathers the tokens of its group and splits the width: only the inputs grow
    gathered = rows.layouts.expert_tensor
    expert = routed * (2.0 * e * h * gathered + _mlp_width_bytes(job) * moe.ffn_hidden_size)
    shared = n * _mlp_width_bytes(job) * moe.shared_expert_ffn_hidden_size / t
    router = n * ROUTER_BYTES * 2.0 * moe.num_experts / split
    return norm + expert + shared + router


def layer_bytes(job: Job, rows: RankColumns) -> tuple[FloatColumn, FloatColumn]:
    """(dense layer, mixture layer) for one micro-batch with nothing recomputed, attention scores apart."""
    attention = _attention(job, rows)
    dense = attention + _mlp(job, rows, mixture=False)
    if job.shape.moe is None:
        return dense, np.zeros(len(rows))
    return dense, attention + _mlp(job, rows, mixture=True)


def in_flight(job: Job, rows: RankColumns) -> FloatColumn:
    """Micro-batches' worth of a rank's layers kept alive at its peak.

    1F1B: min(m, p - r) (PipeDream-Flush). Interleaved with v chunks in groups of g micro-batches: min(2 (p - r - 1) +
    (v - 1) g + 1, m v) chunks of 1/v each (megatron/core/pipeline_parallel/schedules.py, core 0.19).
    """
    p, v, m = rows.layouts.pipeline, rows.layouts.virtual_pipeline, rows.microbatches
    plain = np.minimum(m, p - rows.rank)
    group = p if job.microbatch_group is None else job.microbatch_group
    chunks = np.minimum(2 * (p - rows.rank - 1) + (v - 1) * group + 1, m * v)
    return np.asarray(np.where(v > 1, chunks / v, plain), dtype=np.float64)


def kept_activations(job: Job, rows: RankColumns) -> tuple[FloatColumn, FloatColumn]:
    """(bytes kept by the layers, bytes kept by the embedding), over all micro-batches in flight.

    Full recompute keeps each layer's input alone (Megatron `--recompute-method uniform --recompute-num-layers 1`).
    """
    dense, moe = layer_bytes(job, rows)
    n, split, e = tokens(job, rows), sequence_split(rows), job.facts.activation_bytes
    layers = rows.dense_layers + rows.moe_layers
    scores = np.where(rows.layouts.recompute == RECOMPUTE_NONE, layers * _scores(job, rows), 0.0)
    whole = rows.dense_layers * dense + rows.moe_layers * moe + scores
    inputs = layers * n * e * job.shape.hidden_size / split
    kept = np.where(rows.layouts.recompute == RECOMPUTE_FULL, inputs, whole) * in_flight(job, rows)
    # int64 token ids, their labels, positions and loss mask; dropout's mask where the embedding has one
    embedding = n * (32.0 + dropout_mask(job.shape) / split)
    return kept, np.where(rows.first, embedding * in_flight(job, rows), 0.0)


def loss_bytes(job: Job, rows: RankColumns) -> FloatColumn:
    """Last rank: the final norm (input, output, statistics) and the logits around the loss."""
    n, split, t = tokens(job, rows), sequence_split(rows), rows.layouts.tensor.astype(np.float64)
    norm = n * norm_bytes(job) / split
    logits = n * job.facts.logit_bytes * vocabulary(job, t) / t
    return np.where(rows.last, (norm + logits) * (1 + job.shape.mtp_num_layers), 0.0)


def layer_working_set(job: Job, rows: RankColumns) -> FloatColumn:
    """The most that is alive besides what is kept, while one layer runs backward (or is recomputed).

    Backward of an MLP: gradients of the activation's inputs and output and of the gathered layer input; a temporary
    of the largest matrix where its gradient is not accumulated in place; under full recompute, the layer's own
    activations once more.
    """
    shape, e, n = job.shape, job.facts.activation_bytes, tokens(job, rows)
    t = rows.layouts.tensor.astype(np.float64)
    width = shape.ffn_hidden_size / t
    if shape.moe is not None and any(shape.moe.layer_pattern):
        routed = shape.moe.topk * shape.moe.ffn_hidden_size / sequence_split(rows)
        width = np.maximum(width, routed)
    gradients = n * e * ((3.0 if shape.gated_mlp else 2.0) * width + 2.0 * shape.hidden_size)
    matrix = 0.0 if job.facts.weight_gradient_fused else job.facts.activation_bytes * largest_matrix(job, rows)
    dense, moe = layer_bytes(job, rows)
    again = np.where(rows.layouts.recompute == RECOMPUTE_FULL, np.maximum(dense, moe), 0.0)
    again += np.where(rows.layouts.recompute == RECOMPUTE_NONE, 0.0, _scores(job, rows))
    return np.maximum(gradients, matrix) + again
