"""Exact parameter counts of a model shape, by part.

The same sums as `sum(p.numel() for p in model.parameters())` of the published models: no padding, nothing split.
Linear layers and norms as in transformers 5.23 (models/<family>) and Megatron core 0.19 (core/transformer); checked in
the tests against the published totals and against the modules themselves.
"""

from __future__ import annotations

from llmlaunch.frozen import frozen
from llmlaunch.models.shape import LinearAttention, ModelShape, MoeShape

__all__ = ["LayerParameters", "ModelParameters", "count_parameters", "indexer_parameters"]


@frozen
class LayerParameters:
    """One transformer layer. `mlp` is the dense MLP or the shared expert; `experts` are all routed experts and
    `active_experts` those one token goes through; `router` has the shared expert's gate with it. A bias that balances
    the experts is a buffer and no parameter (modeling_deepseek_v3.py; core/transformer/moe/router.py, core 0.19)."""

    attention: int
    mlp: int
    experts: int
    active_experts: int
    router: int
    norms: int

    @property
    def total(self) -> int:
        return self.attention + self.mlp + self.experts + self.router + self.norms

    @property
    def active(self) -> int:
        return self.total - self.experts + self.active_experts


@frozen
class ModelParameters:
    """A whole model. `head` is 0 where it is tied to the embedding; `mtp` is 0 without multi-token prediction."""

    layers: tuple[LayerParameters, ...]
    embedding: int
    positions: int
    final_norm: int
    head: int
    mtp: int

    @property
    def outside_layers(self) -> int:
        return self.embedding + self.positions + self.final_norm + self.head + self.mtp

    @property
    def total(self) -> int:
        return sum(layer.total for layer in self.layers) + self.outside_layers

    @property
    def active(self) -> int:
        """Parameters one token uses: `topk` of the routed experts, everything else in full."""
        return sum(layer.active for layer in self.layers) + self.outside_layers


def count_parameters(shape: ModelShape) -> ModelParameters:
    """Return the parameter counts of `shape` with its own vocabulary, unpadded."""
    is_mixture = shape.moe.layer_pattern if shape.moe is not None else (0,) * shape.num_layers
    kinds = list(zip(is_mixture, shape.linear_pattern, strict=True))
    each = {kind: _layer(shape, *map(bool, kind)) for kind in set(kinds)}
    layers = tuple(each[kind] for kind in kinds)
    vocabulary = shape.vocab_size * shape.hidden_size
    learned = shape.position_embedding == "learned_absolute"
    return ModelParameters(
        layers=layers,
        embedding=vocabulary,
        positions=shape.max_position_embeddings * shape.hidden_size if learned else 0,
        final_norm=_norm(shape, shape.hidden_size),
        head=0 if shape.tied_embeddings else vocabulary,
        mtp=shape.mtp_num_layers * _mtp_layer(shape, layers[-1]),
    )


def _layer(shape: ModelShape, mixture: bool, linear: bool) -> LayerParameters:
    if linear and shape.linear_attention is not None:
        attention = _linear_attention(shape, shape.linear_attention)
    else:
        attention = _attention(shape) if shape.mla is None else _latent_attention(shape)
    norms = shape.norms_per_layer * _norm(shape, shape.hidden_size)
    moe = shape.moe if mixture else None
    if moe is None:
        return LayerParameters(attention, _mlp(shape, shape.ffn_hidden_size), 0, 0, 0, norms)
    return _mixture_layer(shape, moe, attention, norms)


def _mixture_layer(shape: ModelShape, moe: MoeShape, attention: int, norms: int) -> LayerParameters:
    expert = _mlp(shape, moe.ffn_hidden_size)
    shared = moe.shared_expert_ffn_hidden_size
    return LayerParameters(
        attention=attention,
        mlp=_mlp(shape, shared) if shared else 0,
        experts=moe.num_experts * expert,
        active_experts=moe.topk * expert,
        router=shape.hidden_size * (moe.num_experts + int(moe.shared_expert_gate))
        + (moe.num_experts if shape.linear_bias else 0),
        norms=norms,
    )


def _attention(shape: ModelShape) -> int:
    hidden, query, pair = shape.hidden_size, shape.query_width, 2 * shape.key_value_width
    gate = query if shape.attention_gate else 0
    weights = hidden * (query + gate + pair) + query * hidden
    biases = (query + gate + pair if shape.linear_bias or shape.qkv_bias else 0) + (hidden if shape.linear_bias else 0)
    widths = (query, pair // 2) if shape.qk_norm_of_all_heads else (shape.head_dim, shape.head_dim)
    head_norms = sum(_norm(shape, width) for width in widths) if shape.qk_layernorm else 0
    sinks = shape.num_attention_heads if shape.attention_sinks else 0
    return weights + biases + head_norms + sinks


def _linear_attention(shape: ModelShape, linear: LinearAttention) -> int:
    """A gated delta net: two projections, a convolution of each column, a decay and its bias for each value head, and a
    norm over a head (Qwen3NextGatedDeltaNet; core/ssm/gated_delta_net, core 0.19). The norm is no LayerNorm."""
    projections = shape.hidden_size * (linear.projected_width + linear.value_width)
    return (
        projections + linear.conv_kernel * linear.convolved_width + 2 * linear.num_value_heads + linear.value_head_dim
    )


def _latent_attention(shape: ModelShape) -> int:
    """Multi-latent attention: low-rank queries (optional) and key/values with their norms, no biases."""
    mla = shape.mla
    assert mla is not None
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    query_width = heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
    if mla.q_lora_rank is None:
        query = hidden * query_width
    else:
        query = hidden * mla.q_lora_rank + _norm(shape, mla.q_lora_rank) + mla.q_lora_rank * query_width
    down = hidden * (mla.kv_lora_rank + mla.qk_pos_emb_head_dim) + _norm(shape, mla.kv_lora_rank)
    up = mla.kv_lora_rank * heads * (mla.qk_head_dim + mla.v_head_dim)
    return query + down + up + heads * mla.v_head_dim * hidden + indexer_parameters(shape)


def indexer_parameters(shape: ModelShape) -> int:
    """Queries from their latent, one key and a weight of each head from the stream, and the key's LayerNorm, which has
    a bias (modeling_deepseek_v32.py DeepseekV32Indexer; experimental_attention_variant/dsa.py DSAIndexer)."""
    indexer, mla = shape.indexer, shape.mla
    if indexer is None or mla is None or mla.q_lora_rank is None:
        return 0
    queries = mla.q_lora_rank * indexer.heads * indexer.head_dim
    return queries + shape.hidden_size * (indexer.head_dim + indexer.heads) + 2 * indexer.head_dim


def _mlp(shape: ModelShape, inner: int) -> int:
    rows = 2 if shape.gated_mlp else 1
    biases = rows * inner + shape.hidden_size if shape.linear_bias else 0
    return (rows + 1) * shape.hidden_size * inner + biases


def _norm(shape: ModelShape, width: int) -> int:
    return width if shape.normalization == "RMSNorm" else 2 * width


def _mtp_layer(shape: ModelShape, layer: LayerParameters) -> int:
    """One multi-token-prediction module: two norms, a projection of 2h to h, a layer and its final norm
    (Megatron core 0.19, core/transformer/multi_token_prediction.py); embedding and head are shared."""
    return layer.total + 3 * _norm(shape, shape.hidden_size) + 2 * shape.hidden_size**2
