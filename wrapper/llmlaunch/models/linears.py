"""The weight matrices of one transformer layer as Megatron core has them, and which side of each tensor parallelism
divides."""

from __future__ import annotations

from llmlaunch.frozen import frozen
from llmlaunch.models.attention import CHOSEN_FROM
from llmlaunch.models.shape import ModelShape

__all__ = [
    "Linear",
    "attention_linears",
    "delta_linears",
    "latent_linears",
    "mamba_linears",
    "mlp_linears",
    "pooling_linears",
    "projecting_linears",
]


@frozen
class Linear:
    """A matrix of `inputs` x `outputs`, one of which tensor parallelism divides; "neither" keeps the matrix whole and
    divides the tokens (the down projections of latent attention work on the sequence-parallel share)."""

    inputs: float
    outputs: float
    divided: str  # "inputs", "outputs" or "neither"


def attention_linears(shape: ModelShape) -> tuple[Linear, ...]:
    """Return the projections of one attention block (megatron/core/transformer/attention.py and
    multi_latent_attention.py, core 0.19)."""
    h = float(shape.hidden_size)
    if shape.compressed_attention is not None:
        return *projecting_linears(shape), *pooling_linears(shape)
    if shape.mla is None:
        gates = shape.query_width if shape.attention_gate else 0
        mixed = float(shape.query_width + gates + shape.projected_groups * shape.key_value_width)
        return Linear(h, mixed, "outputs"), Linear(float(shape.query_width), h, "inputs")
    mla, heads = shape.mla, shape.num_attention_heads
    queries = float(heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim))
    down = Linear(h, float(mla.kv_lora_rank + mla.qk_pos_emb_head_dim), "neither")
    up = Linear(float(mla.kv_lora_rank), float(heads * (mla.qk_head_dim + mla.v_head_dim)), "outputs")
    last = Linear(float(heads * mla.v_head_dim), h, "inputs")
    if mla.q_lora_rank is None:
        return Linear(h, queries, "outputs"), down, up, last
    rank = float(mla.q_lora_rank)
    return Linear(h, rank, "neither"), Linear(rank, queries, "outputs"), down, up, last


def projecting_linears(shape: ModelShape) -> tuple[Linear, ...]:
    """Return the projections of attention to pooled keys that narrower formats take (Megatron-LM d48bd6be,
    experimental_attention_variant/deepseek_v4_hybrid_attention.py and csa.py)."""
    compressed, h = shape.compressed_attention, float(shape.hidden_size)
    assert compressed is not None
    rank, output = float(compressed.q_lora_rank), float(compressed.output_groups * compressed.output_rank)
    projections = (
        Linear(h, rank, "neither"),
        Linear(rank, float(shape.query_width), "outputs"),
        Linear(h, float(shape.head_dim), "neither"),
        Linear(output, h, "inputs"),
    )
    queries = Linear(rank, float(compressed.index_heads * compressed.index_head_dim), "neither")
    return (*projections, queries) if compressed.ratio == CHOSEN_FROM else projections


def pooling_linears(shape: ModelShape) -> tuple[Linear, ...]:
    """Return those in the compute format: of heads by groups, of what is pooled and of its weights, and of the
    indexer's heads."""
    compressed, h = shape.compressed_attention, float(shape.hidden_size)
    assert compressed is not None
    groups = Linear(float(shape.query_width), float(compressed.output_rank), "inputs")
    pooled = [Linear(h, float(compressed.halves * shape.head_dim), "neither")] * (2 if compressed.ratio else 0)
    if compressed.ratio != CHOSEN_FROM:
        return groups, *pooled
    narrow = Linear(h, float(compressed.halves * compressed.index_head_dim), "neither")
    return groups, *pooled, narrow, narrow, Linear(h, float(compressed.index_heads), "neither")


def delta_linears(shape: ModelShape) -> tuple[Linear, ...]:
    """Return the projections of one gated delta net; none without such layers (megatron/core/ssm/gated_delta_net, core
    0.19)."""
    linear = shape.linear_attention
    if linear is None:
        return ()
    h = float(shape.hidden_size)
    return Linear(h, float(linear.projected_width), "outputs"), Linear(float(linear.value_width), h, "inputs")


def mamba_linears(shape: ModelShape) -> tuple[Linear, ...]:
    """Return the projections of one Mamba-2 mixer; none without such layers (megatron/core/ssm/mamba_mixer.py, core
    0.19)."""
    mamba = shape.mamba
    if mamba is None:
        return ()
    h = float(shape.hidden_size)
    return Linear(h, float(mamba.projected_width), "outputs"), Linear(float(mamba.inner_width), h, "inputs")


def mlp_linears(shape: ModelShape, width: float, outer: int | None = None) -> tuple[Linear, ...]:
    """Return the first (gate and up together) and second matrix of an MLP `width` wide inside and `outer` outside, as
    the residual stream where that is not given."""
    if not width:
        return ()
    h = float(shape.hidden_size if outer is None else outer)
    return Linear(h, (2.0 if shape.gated_mlp else 1.0) * width, "outputs"), Linear(width, h, "inputs")


def latent_linears(shape: ModelShape) -> tuple[Linear, ...]:
    """Return the projections to and from what experts take in, whole on every device; none where that is the residual
    stream (megatron/core/transformer/moe/moe_layer.py, core 0.19)."""
    if shape.moe is None or shape.moe.latent_size is None:
        return ()
    h, latent = float(shape.hidden_size), float(shape.moe.latent_size)
    return Linear(h, latent, "neither"), Linear(latent, h, "neither")
