"""A model as a list of layers: the one place that makes blocks of a model's shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from llmlaunch.columns import IntColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.attention import Attention, SoftmaxAttention, Window
from llmlaunch.layers.block import Block
from llmlaunch.layers.delta_net import DeltaNet
from llmlaunch.layers.latent_attention import LatentAttention
from llmlaunch.layers.layer import Branch, Layer
from llmlaunch.layers.mamba import Mamba2
from llmlaunch.layers.mixture import Mixture
from llmlaunch.layers.mlp import Mlp
from llmlaunch.layers.pooled_attention import PooledAttention
from llmlaunch.layers.short_convolution import ShortConvolution
from llmlaunch.layers.sparse_attention import SparseAttention
from llmlaunch.models.mamba import BESIDE_ATTENTION
from llmlaunch.models.shape import CLAMPED, SQUARED, ModelShape, Multipliers

__all__ = ["Model", "model_of", "norm_parameters", "stream_contraction", "stream_mixing"]


@frozen
class Model:
    """The different layers of a model (`kinds`), the kind of each decoder layer (`order`), and those of the layers of
    one multi-token-prediction module (`predicts`): of a pattern of its own, or one like the model's last
    (megatron/core/transformer/multi_token_prediction.py, core 0.19)."""

    kinds: tuple[Layer, ...]
    order: tuple[int, ...]
    predicts: tuple[int, ...] = ()

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many decoder layers are of each kind."""
        return tuple(self.order.count(kind) for kind in range(len(self.kinds)))

    @cached_property
    def before(self) -> tuple[IntColumn, ...]:
        """How many layers of each kind come before each decoder layer, and before the end."""
        order = np.array(self.order)
        return tuple(np.concatenate([[0], np.cumsum(order == kind)]) for kind in range(len(self.kinds)))

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The different blocks of all layers."""
        return tuple(dict.fromkeys(block for layer in self.kinds for block in layer.blocks))

    def has(self, kind: type[Block]) -> bool:
        """Whether some layer has a block of this kind."""
        return any(isinstance(block, kind) for block in self.blocks)

    @cached_property
    def heads_differ(self) -> bool:
        """Whether softmax attention of some layers has other heads than that of others (Gemma 4)."""
        return len({block.matrices for block in self.blocks if isinstance(block, SoftmaxAttention)}) > 1

    @cached_property
    def first_blocks_differ(self) -> bool:
        """Whether some layers have other parameters in the place of attention than others."""
        first = (layer.branches[0].blocks for layer in self.kinds)
        return len({tuple((block.matrices, block.vectors) for block in blocks) for blocks in first}) > 1

    @cached_property
    def layers_are_branches(self) -> bool:
        """Whether layers have one branch each, so that nothing in a layer runs backward before its block."""
        return any(len(layer.branches) == 1 for layer in self.kinds)

    @cached_property
    def classes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The kinds of decoder layers that are no mixtures, and those that are."""
        there = [kind for kind, count in enumerate(self.counts) if count]
        mixtures = tuple(kind for kind in there if self.kinds[kind].is_mixture)
        return tuple(kind for kind in there if kind not in mixtures), mixtures

    @cached_property
    def single_groups(self) -> tuple[tuple[int, ...], ...]:
        """Each kind by itself."""
        return tuple((kind,) for kind in range(len(self.kinds)))

    @cached_property
    def mixture(self) -> Mixture | None:
        """The mixture of experts, which is alike in all layers that have one; None without any."""
        return next((block for layer in self.kinds for block in layer.blocks_of(Mixture)), None)

    @cached_property
    def decoder_kinds(self) -> tuple[int, ...]:
        """The kinds that decoder layers are of, in order."""
        return tuple(sorted((*self.classes[0], *self.classes[1])))


def norm_parameters(shape: ModelShape) -> float:
    """Return the parameters of a norm as wide as the residual stream."""
    return float(shape.hidden_size * _norm_vectors(shape))


def _norm_vectors(shape: ModelShape) -> int:
    return 1 if shape.normalization == "RMSNorm" else 2


def stream_mixing(shape: ModelShape) -> int:
    """Return the parameters of what mixes residual streams around one block: a projection of all of them with its bias,
    and three scales; 0 for one stream (modeling_deepseek_v4.py DeepseekV4HyperConnection; core/transformer/
    hyper_connection.py)."""
    streams = shape.residual_streams
    mixed = streams * (streams + 2)
    return mixed * (shape.stream_width + 1) + 3 if streams > 1 else 0


def stream_contraction(shape: ModelShape) -> int:
    """Return the parameters of what makes one stream of several behind the last layer; 0 for one stream."""
    streams = shape.residual_streams
    return streams * (shape.stream_width + 1) + 1 if streams > 1 else 0


@lru_cache(maxsize=256)
def model_of(shape: ModelShape) -> Model:
    """Return the layers of a shape."""
    layers = tuple(_layer(shape, parts) for parts in _decoder_parts(shape))
    predicts = tuple(_layer(shape, parts) for parts in _prediction_parts(shape))
    kinds = tuple(dict.fromkeys((*layers, *predicts)))
    return Model(kinds, tuple(map(kinds.index, layers)), tuple(map(kinds.index, predicts)))


Parts = tuple[tuple[Block, ...], ...]  # the blocks of each branch of a layer


def _decoder_parts(shape: ModelShape) -> list[Parts]:
    if shape.mamba is not None:
        return [_lettered(shape, letter) for letter in shape.mamba.pattern]
    pattern = shape.moe.layer_pattern if shape.moe is not None else (0,) * shape.num_layers
    return [
        ((_mixer(shape, at),), (_mixture(shape) if mixture else _mlp(shape),)) for at, mixture in enumerate(pattern)
    ]


def _prediction_parts(shape: ModelShape) -> Sequence[Parts]:
    if not shape.mtp_num_layers:
        return ()
    if shape.mamba is not None:
        return [_lettered(shape, letter) for letter in shape.mamba.mtp_pattern or ""]
    mixers, mlps = _decoder_parts(shape)[-1]
    # a layer for multi-token prediction pools nothing (Megatron-Bridge 067f987d, models/deepseek/deepseek_v4_bridge.py
    # _dsv4_compress_ratios)
    return [((_pooled(shape, 0),) if shape.compressed_attention is not None else mixers, mlps)]


def _lettered(shape: ModelShape, letter: str) -> Parts:
    """Return the blocks of a layer by its letter (`models.mamba.PARTS`)."""
    if letter == BESIDE_ATTENTION:
        return (_mamba(shape), _attention(shape, full=False)), (_mlp(shape),)
    if letter == "M":
        return ((_mamba(shape),),)
    if letter == "*":
        return ((_attention(shape, full=False),),)
    return ((_mixture(shape) if letter == "E" else _mlp(shape),),)


def _layer(shape: ModelShape, parts: Parts) -> Layer:
    return Layer(
        tuple(
            Branch(
                hidden=shape.hidden_size,
                blocks=blocks,
                norm_parameters=norm_parameters(shape),
                post_norm=shape.post_norms,
                dropout=shape.hidden_dropout > 0,
                streams=shape.residual_streams,
                mixing_parameters=float(stream_mixing(shape)),
            )
            for blocks in parts
        )
    )


def _mixer(shape: ModelShape, at: int) -> Block:
    """Return what the layer at a place has for attention, or instead of it."""
    linear, compressed, window = shape.linear_attention, shape.compressed_attention, shape.sliding_window
    convolution = shape.short_convolution
    if convolution is not None and at not in convolution.attention_layers:
        return ShortConvolution(shape.hidden_size, convolution.kernel, convolution.bias)
    if linear is not None and shape.linear_pattern[at]:
        return DeltaNet(
            shape.hidden_size,
            linear.num_key_heads,
            linear.num_value_heads,
            linear.key_head_dim,
            linear.value_head_dim,
            linear.conv_kernel,
        )
    if compressed is not None:
        return _pooled(shape, compressed.ratios[at])
    if shape.mla is not None:
        return _latent(shape)
    return _attention(shape, full=window is not None and window.full_every > 0 and not (at + 1) % window.full_every)


def _attention(shape: ModelShape, full: bool) -> Attention:
    """Return grouped-query attention; `full`: of a layer that sees everything, where others have a window (Gemma 4 has
    other heads there)."""
    window, norm = shape.sliding_window, None
    if shape.qk_l2_norm:
        norm = "l2"
    elif shape.qk_layernorm:
        norm = "all" if shape.qk_norm_of_all_heads else "head"
    head_dim, groups, constants = shape.head_dim, shape.num_query_groups, shape.multipliers or Multipliers()
    if full and window is not None:
        head_dim, groups = window.full_head_dim or head_dim, window.full_query_groups or groups
    return Attention(
        hidden=shape.hidden_size,
        heads=shape.num_attention_heads,
        groups=groups,
        head_dim=head_dim,
        bias=shape.linear_bias or shape.qkv_bias,
        output_bias=shape.linear_bias,
        query_key_norm=norm,
        value_norm=shape.value_norm,
        keys_are_values=shape.keys_are_values and (full or window is None or not window.full_every),
        sinks=shape.attention_sinks,
        gate=shape.attention_gate,
        rope=shape.position_embedding == "rope",
        dropout=shape.attention_dropout > 0,
        softcap=shape.attention_softcap is not None,
        window=None if window is None or full else Window(window.tokens, window.chunked),
        turned_beside_images=shape.vision is not None,
        norm_vectors=_norm_vectors(shape),
        scaled=_scaled(
            (constants.attention_input, shape.hidden_size),
            (constants.keys, groups * head_dim),
            (constants.attention_output, shape.hidden_size),
            (constants.residual, shape.hidden_size),
        ),
        scaled_input=constants.attention_input is not None,
    )


def _latent(shape: ModelShape) -> LatentAttention:
    mla, indexer = shape.mla, shape.indexer
    assert mla is not None
    ordinary = LatentAttention(
        hidden=shape.hidden_size,
        heads=shape.num_attention_heads,
        query_rank=mla.q_lora_rank,
        key_value_rank=mla.kv_lora_rank,
        head_dim=mla.qk_head_dim,
        positions=mla.qk_pos_emb_head_dim,
        value_head_dim=mla.v_head_dim,
        norm_parameters=norm_parameters(shape),
        norm_vectors=_norm_vectors(shape),
        dropout=shape.attention_dropout > 0,
        softcap=shape.attention_softcap is not None,
        gate=shape.attention_gate,
    )
    if indexer is None:
        return ordinary
    values: dict[str, Any] = {field.name: getattr(ordinary, field.name) for field in fields(ordinary)}
    return SparseAttention(**values, index_heads=indexer.heads, index_head_dim=indexer.head_dim, topk=indexer.topk)


def _pooled(shape: ModelShape, ratio: int) -> PooledAttention:
    compressed = shape.compressed_attention
    assert compressed is not None
    return PooledAttention(
        hidden=shape.hidden_size,
        heads=shape.num_attention_heads,
        head_dim=shape.head_dim,
        query_rank=compressed.q_lora_rank,
        ratio=ratio,
        window=compressed.window,
        output_groups=compressed.output_groups,
        output_rank=compressed.output_rank,
        index_heads=compressed.index_heads,
        index_head_dim=compressed.index_head_dim,
        index_topk=compressed.index_topk,
        norm_vectors=_norm_vectors(shape),
    )


def _mamba(shape: ModelShape) -> Mamba2:
    mamba, constants = shape.mamba, shape.multipliers or Multipliers()
    assert mamba is not None
    mixer = Mamba2(
        hidden=shape.hidden_size,
        heads=mamba.num_heads,
        head_dim=mamba.head_dim,
        state_size=mamba.state_size,
        groups=mamba.groups,
        kernel=mamba.convolution_kernel,
        kernel_bias=mamba.convolution_bias,
        chunk=mamba.chunk,
        gated_norm=mamba.gated_norm,
        scaled_input=constants.mamba_input is not None,
        scaled_output=constants.mamba_output is not None,
    )
    scaled = _scaled(
        (constants.mamba_input, shape.hidden_size),
        (None if constants.mamba_parts is None else 1.0, mixer.projected_width),
        (constants.mamba_output, shape.hidden_size),
    )
    return replace(mixer, scaled=scaled)


def _mlp(shape: ModelShape) -> Mlp:
    constants = shape.multipliers or Multipliers()
    scaled = _scaled(
        (constants.gate, shape.ffn_hidden_size),
        (constants.mlp_output, shape.hidden_size),
        (constants.residual, shape.hidden_size),
    )
    return Mlp(
        hidden=shape.hidden_size,
        width=shape.ffn_hidden_size,
        gated=shape.gated_mlp,
        bias=shape.linear_bias,
        scaled=scaled,
        scaled_output=constants.mlp_output is not None or constants.residual is not None,
    )


def _scaled(*products: tuple[float | None, int]) -> tuple[float, ...]:
    """Return the columns of tensors that are multiplied by a constant, of those that may be."""
    return tuple(float(columns) for constant, columns in products if constant is not None)


def _mixture(shape: ModelShape) -> Mixture:
    moe = shape.moe
    assert moe is not None
    router = moe.router
    return Mixture(
        hidden=shape.hidden_size,
        experts=moe.num_experts,
        topk=moe.topk,
        width=moe.ffn_hidden_size,
        gated=shape.gated_mlp,
        squared=shape.activation == SQUARED,
        clamped=shape.activation == CLAMPED,
        shared_width=moe.shared_expert_ffn_hidden_size,
        shared_gate=moe.shared_expert_gate,
        latent=moe.latent_size,
        bias=shape.linear_bias,
        all_scored=router.score_function != "softmax" or not router.normalize_topk,
        weighted_inputs=router.weighted_inputs,
        capacity_factor=moe.capacity_factor,
        groups=router.groups,
        group_topk=router.group_topk,
    )
