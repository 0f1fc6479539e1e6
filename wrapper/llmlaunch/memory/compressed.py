"""What attention to pooled keys and several residual streams keep and make, DeepSeek-V4's, for one micro-batch.

Read off the sources of Megatron-LM's development branch at d48bd6be (August 2026): core/transformer/
experimental_attention_variant/deepseek_v4_hybrid_attention.py, csa.py and csa_utils/fused_sparse_attention.py, and
core/transformer/hyper_connection.py. No job of ours has run them. Tensor parallelism splits none of it.
"""

from __future__ import annotations

import math

from llmlaunch.columns import FloatColumn
from llmlaunch.memory.job import Job
from llmlaunch.models.attention import CHOSEN_FROM, CompressedAttention
from llmlaunch.models.shape import ModelShape

__all__ = ["attention_backward", "attention_tensors", "mixing_backward", "narrow_weights", "stream_tensors"]


FP32_BYTES = 4.0
INDEX_BYTES = 4.0  # of the number of a key
INDEX_TILE = 128.0  # numbers of keys come in whole tiles
POOLING_BYTES = FP32_BYTES + 2.0 + 2.0  # softmax in fp32, its weights and what they weigh in 16 bits


def attention_tensors(job: Job, n: FloatColumn) -> dict[str, FloatColumn]:
    """Return what attention to keys pooled by one ratio saves of `n` tokens, the norm before it included.

    Queries are kept before and after the norm of each head, and attention's output before and after its positions are
    turned back. What pools and the projection of heads by groups stay in 16 bits beside narrower formats, and so does
    what they read. The loss that teaches the indexer computes its gradients in the forward pass and keeps them."""
    shape, e, narrow = job.shape, job.facts.activation_bytes, job.facts.linear_input_bytes
    compressed = shape.compressed_attention
    assert compressed is not None
    h, width, rank = shape.hidden_size, float(shape.query_width), compressed.q_lora_rank
    copies = 2.0 * narrow if narrow < e else 0.0  # of two projections that read the same input
    heads = FP32_BYTES * shape.num_attention_heads
    return {
        "attn_norm_output": n * (e + copies) * h,
        "attn_latents": n * (2.0 * e * rank + FP32_BYTES),
        "attn_latents_normed": n * (narrow * rank if narrow < e else 0.0),
        "attn_qkv": n * (e * (2.0 * width + 2.0 * shape.head_dim) + heads + FP32_BYTES),
        "attn_pooled": n * _pooled(job, shape, compressed),
        "attn_pooled_output": n * (2.0 * e * width + heads),
        "attn_proj_input": n * e * compressed.output_groups * compressed.output_rank,
    }


def _pooled(job: Job, shape: ModelShape, compressed: CompressedAttention) -> float:
    """Bytes per token of the keys that attention reads, of which ones a query sees, of what pooled them, and of what
    the indexer keeps."""
    e, ratio, sequence = job.facts.activation_bytes, compressed.ratio, job.workload.sequence_length
    if not ratio:
        return INDEX_BYTES * INDEX_TILE * math.ceil(compressed.window / INDEX_TILE)
    chosen = compressed.index_topk if ratio == CHOSEN_FROM else sequence / ratio
    seen = INDEX_BYTES * INDEX_TILE * math.ceil((compressed.window + chosen) / INDEX_TILE)
    columns = float(compressed.halves * shape.head_dim)
    saved_bytes = seen + e * shape.head_dim * (1.0 + 3.0 / ratio) + POOLING_BYTES * columns
    if ratio != CHOSEN_FROM:
        return float(saved_bytes)
    index, rank = compressed.index_head_dim, compressed.q_lora_rank
    gradients = e * (compressed.index_heads * (index + 1.0) + index / ratio)
    narrow = job.facts.linear_input_bytes * rank if job.facts.linear_input_bytes < e else 0.0
    return float(saved_bytes + POOLING_BYTES * compressed.halves * index + gradients + narrow)


def attention_backward(job: Job, n: FloatColumn, recomputed: FloatColumn) -> FloatColumn:
    """Return what attention's backward pass makes beside the saved tensors of `n` tokens: the gradients of its output
    and of the queries, less the output that was turned back, which is freed by then; those of all keys in fp32; and the
    queries where they are `recomputed`."""
    shape, e = job.shape, job.facts.activation_bytes
    compressed = shape.compressed_attention
    assert compressed is not None
    keys = FP32_BYTES * shape.head_dim * (1.0 + (1.0 / compressed.ratio if compressed.ratio else 0.0))
    return n * (e * shape.query_width + keys) + recomputed


def stream_tensors(job: Job, n: FloatColumn, block: str) -> dict[str, FloatColumn]:
    """Return what the mixing of residual streams around one block saves: all of them, what the block puts out, and the
    weights of the mixing. Unfused, the projection that makes those reads a copy in fp32."""
    shape, e = job.shape, job.facts.activation_bytes
    streams = shape.residual_streams
    if streams == 1:
        return {}
    weights = (FP32_BYTES + e) * streams * (streams + 2) + FP32_BYTES * streams**2
    each = (e + job.facts.stream_copy_bytes) * shape.stream_width + e * shape.hidden_size + weights
    return {f"{block}_streams": n * each}


def mixing_backward(job: Job, n: FloatColumn) -> FloatColumn | float:
    """Return the gradients of all streams that are summed behind a block: of the residual, of what went into the block
    and of the weights; the first of them is counted as the stream's own."""
    if job.shape.residual_streams == 1:
        return 0.0
    return 3.0 * job.facts.activation_bytes * n * job.shape.stream_width


def narrow_weights(shape: ModelShape, compressed: CompressedAttention) -> float:
    """Return the elements of one layer's matrices that a narrower number format is applied to."""
    rank, h = compressed.q_lora_rank, shape.hidden_size
    matrices = (
        (h + shape.query_width) * rank + h * shape.head_dim + compressed.output_groups * compressed.output_rank * h
    )
    queries = rank * compressed.index_heads * compressed.index_head_dim if compressed.ratio == CHOSEN_FROM else 0
    return float(matrices + queries)
