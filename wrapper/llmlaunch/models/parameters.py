"""Exact parameter counts of a model shape, by part.

The same sums as `sum(p.numel() for p in model.parameters())` of the published models: no padding, nothing split.
Linear layers and norms as in transformers 5.23 (models/<family>) and Megatron core 0.19 (core/transformer); checked in
the tests against the published totals and against the modules themselves.
"""

from __future__ import annotations

from functools import lru_cache

from llmlaunch.frozen import frozen
from llmlaunch.models.attention import CHOSEN_FROM, CompressedAttention, LinearAttention
from llmlaunch.models.kinds import attention_kinds, layer_parts
from llmlaunch.models.mamba import CONV_KERNEL, PARTS, Mamba
from llmlaunch.models.shape import ModelShape, MoeShape
from llmlaunch.models.vision import encoder_parameters

__all__ = [
    "LayerParameters",
    "ModelParameters",
    "compressed_attention",
    "count_parameters",
    "indexer_parameters",
    "stream_contraction",
    "stream_mixing",
]


@frozen
class LayerParameters:
    """One layer. `attention` is also a mixer in its place, `mlp` the dense MLP or the shared expert; `experts` are all
    routed experts and `active_experts` those one token goes through; `router` has the shared expert's gate with it, and
    projections to and from experts' latents. A bias that balances the experts is a buffer and no parameter
    (modeling_deepseek_v3.py; core/transformer/moe/router.py, core 0.19)."""

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
    """A whole model. `head` is 0 where it is tied to the embedding; `mtp` is 0 without multi-token prediction. What
    brings residual streams together is part of `final_norm`. `vision` is 0 without an encoder."""

    layers: tuple[LayerParameters, ...]
    embedding: int
    positions: int
    final_norm: int
    head: int
    mtp: int
    vision: int = 0

    @property
    def outside_layers(self) -> int:
        return self.embedding + self.positions + self.final_norm + self.head + self.mtp + self.vision

    @property
    def total(self) -> int:
        return sum(layer.total for layer in self.layers) + self.outside_layers

    @property
    def active(self) -> int:
        """Parameters one token uses: `topk` of the routed experts, everything else in full."""
        return sum(layer.active for layer in self.layers) + self.outside_layers


@lru_cache(maxsize=256)
def count_parameters(shape: ModelShape) -> ModelParameters:
    """Return the parameter counts of `shape` with its own vocabulary, unpadded."""
    is_mixture = shape.moe.layer_pattern if shape.moe is not None else (0,) * shape.num_layers
    attention = attention_kinds(shape)
    of_layers = [next(kind for kind in attention if kind.layers[i]) for i in range(shape.num_layers)]
    kinds = list(zip(map(bool, is_mixture), layer_parts(shape), of_layers, strict=True))
    each = {kind: _layer(kind[2].shape, kind[0], kind[1]) for kind in set(kinds)}
    layers = tuple(each[kind] for kind in kinds)
    predicting = layers[-1]
    if shape.mtp_num_layers and not of_layers[-1].predicts:
        last = next(kind.shape for kind in attention if kind.predicts)
        predicting = _layer(last, bool(is_mixture[-1]), "attention")
    vocabulary = shape.vocab_size * shape.hidden_size
    learned = shape.position_embedding == "learned_absolute"
    return ModelParameters(
        layers=layers,
        embedding=vocabulary,
        positions=shape.max_position_embeddings * shape.hidden_size if learned else 0,
        final_norm=_norm(shape, shape.hidden_size) + stream_contraction(shape),
        head=0 if shape.tied_embeddings else vocabulary,
        mtp=shape.mtp_modules * _mtp_module(shape, predicting),
        vision=0 if shape.vision is None else encoder_parameters(shape.vision, shape.hidden_size).total,
    )


def _layer(shape: ModelShape, mixture: bool, part: str) -> LayerParameters:
    norms = shape.norms_per_layer * _norm(shape, shape.hidden_size) + 2 * stream_mixing(shape)
    mixer, moe = _mixer(shape, part), shape.moe if mixture else None
    if moe is not None:
        return _mixture_layer(shape, moe, mixer, norms)
    width = shape.ffn_hidden_size if shape.mamba is None or part == "mlp" else 0
    return LayerParameters(mixer, _mlp(shape, width) if width else 0, 0, 0, 0, norms)


def _mixer(shape: ModelShape, part: str) -> int:
    if part == "mamba" and shape.mamba is not None:
        return _mamba(shape, shape.mamba)
    if part == "linear" and shape.linear_attention is not None:
        return _linear_attention(shape, shape.linear_attention)
    if part != "attention":
        return 0
    return _attention(shape)


def _mixture_layer(shape: ModelShape, moe: MoeShape, attention: int, norms: int) -> LayerParameters:
    expert = _mlp(shape, moe.ffn_hidden_size, shape.expert_width)
    latents = 0 if moe.latent_size is None else 2 * shape.hidden_size * moe.latent_size
    shared = moe.shared_expert_ffn_hidden_size
    return LayerParameters(
        attention=attention,
        mlp=_mlp(shape, shared) if shared else 0,
        experts=moe.num_experts * expert,
        active_experts=moe.topk * expert,
        router=shape.hidden_size * (moe.num_experts + int(moe.shared_expert_gate))
        + (moe.num_experts if shape.linear_bias else 0)
        + latents,
        norms=norms,
    )


def _attention(shape: ModelShape) -> int:
    if shape.mla is not None:
        return _latent_attention(shape)
    if shape.compressed_attention is not None:
        return compressed_attention(shape, shape.compressed_attention)
    hidden, query, pair = shape.hidden_size, shape.query_width, shape.projected_groups * shape.key_value_width
    gate = query if shape.attention_gate else 0
    weights = hidden * (query + gate + pair) + query * hidden
    biases = (query + gate + pair if shape.linear_bias or shape.qkv_bias else 0) + (hidden if shape.linear_bias else 0)
    widths = (query, shape.key_value_width) if shape.qk_norm_of_all_heads else (shape.head_dim, shape.head_dim)
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


def _mamba(shape: ModelShape, mamba: Mamba) -> int:
    """A Mamba-2 mixer: two projections, a convolution of each column with its bias, a decay, a skip and the bias of a
    step for each head, and the weight of the norm (NemotronHMamba2Mixer; core/ssm/mamba_mixer.py, core 0.19)."""
    projections = shape.hidden_size * (mamba.projected_width + mamba.inner_width)
    return projections + (CONV_KERNEL + 1) * mamba.convolved_width + 3 * mamba.num_heads + mamba.inner_width


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


def compressed_attention(shape: ModelShape, compressed: CompressedAttention) -> int:
    """Attention to keys pooled by one ratio: queries from a latent, one key for all heads, the two projections of the
    output, a sink of each head, and what pools and chooses (modeling_deepseek_v4.py DeepseekV4Attention, 5.23;
    experimental_attention_variant/deepseek_v4_hybrid_attention.py and csa.py, Megatron-LM d48bd6be)."""
    hidden, heads, width = shape.hidden_size, shape.num_attention_heads, shape.query_width
    rank, projected = compressed.q_lora_rank, compressed.output_groups * compressed.output_rank
    queries = hidden * rank + _norm(shape, rank) + rank * width
    keys = hidden * shape.head_dim + _norm(shape, shape.head_dim)
    output = width * compressed.output_rank + projected * hidden
    return queries + keys + output + heads + _pooling(shape, compressed)


def _pooling(shape: ModelShape, compressed: CompressedAttention) -> int:
    """What makes one key of several tokens: their columns, a weight of each, a bias by place in the window and a norm;
    the same for the indexer's narrow keys, and its queries and weights of heads."""
    ratio = compressed.ratio

    def pooled(width: int) -> int:
        columns = compressed.halves * width
        return 2 * shape.hidden_size * columns + ratio * columns + _norm(shape, width)

    if not ratio:
        return 0
    if ratio != CHOSEN_FROM:
        return pooled(shape.head_dim)
    queries = compressed.q_lora_rank * compressed.index_heads * compressed.index_head_dim
    weights = shape.hidden_size * compressed.index_heads
    return pooled(shape.head_dim) + pooled(compressed.index_head_dim) + queries + weights


def stream_mixing(shape: ModelShape) -> int:
    """What mixes residual streams around one block: a projection of all of them with its bias, and three scales; 0 for
    one stream (modeling_deepseek_v4.py DeepseekV4HyperConnection; core/transformer/hyper_connection.py)."""
    streams = shape.residual_streams
    mixed = streams * (streams + 2)
    return mixed * (shape.stream_width + 1) + 3 if streams > 1 else 0


def stream_contraction(shape: ModelShape) -> int:
    """What makes one stream of several behind the last layer; 0 for one stream."""
    streams = shape.residual_streams
    return streams * (shape.stream_width + 1) + 1 if streams > 1 else 0


def _mlp(shape: ModelShape, inner: int, outer: int | None = None) -> int:
    rows, outer = 2 if shape.gated_mlp else 1, shape.hidden_size if outer is None else outer
    biases = rows * inner + outer if shape.linear_bias else 0
    return (rows + 1) * outer * inner + biases


def _norm(shape: ModelShape, width: int) -> int:
    return width if shape.normalization == "RMSNorm" else 2 * width


def _mtp_module(shape: ModelShape, last: LayerParameters) -> int:
    """One multi-token-prediction module: two norms, a projection of 2h to h, a layer like the `last` one, or the layers
    of its own pattern, and a final norm (Megatron core 0.19, core/transformer/multi_token_prediction.py); embedding and
    head are shared."""
    mamba = shape.mamba
    layers = last.total
    if mamba is not None and mamba.mtp_pattern is not None:
        layers = sum(_layer(shape, letter == "E", PARTS[letter]).total for letter in mamba.mtp_pattern)
    return layers + 3 * _norm(shape, shape.hidden_size) + 2 * shape.hidden_size**2 + stream_contraction(shape)
