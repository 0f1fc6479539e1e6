"""Arithmetic a model needs, whatever the hardware: the numerator of the model FLOPs utilisation."""

from __future__ import annotations

from llmlaunch.models.shape import ModelShape
from llmlaunch.timing.products import attention_linears, mlp_linears

__all__ = ["attention_width", "layer_matrix_parameters", "model_flops_per_token"]


def layer_matrix_parameters(shape: ModelShape) -> float:
    """Weights a token passes through in one layer, averaged over dense and mixture layers."""
    attention = sum(one.inputs * one.outputs for one in attention_linears(shape))
    dense = sum(one.inputs * one.outputs for one in mlp_linears(shape, float(shape.ffn_hidden_size)))
    if shape.moe is None:
        return attention + dense
    moe = shape.moe
    share = sum(moe.layer_pattern) / len(moe.layer_pattern)
    width = float(moe.topk * moe.ffn_hidden_size + moe.shared_expert_ffn_hidden_size)
    mixture = sum(one.inputs * one.outputs for one in mlp_linears(shape, width))
    return attention + share * mixture + (1.0 - share) * dense


def attention_width(shape: ModelShape) -> float:
    """Elements of a key and a value over all query heads: times the sequence, a token's causal attention forward."""
    if shape.mla is None:
        return 2.0 * shape.query_width
    mla = shape.mla
    return float(shape.num_attention_heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim + mla.v_head_dim))


def model_flops_per_token(shape: ModelShape, sequence_length: int) -> float:
    """Forward and backward, causal attention (half of the square), nothing recomputed (Narayanan et al. 2021, appendix,
    with the causal half and grouped queries)."""
    layer = 2.0 * layer_matrix_parameters(shape) + sequence_length * attention_width(shape)
    head = 2.0 * shape.hidden_size * shape.vocab_size
    projection = 4.0 * shape.hidden_size**2
    more = shape.mtp_num_layers * (layer + head + projection)
    return 3.0 * (shape.num_layers * layer + head + more)
