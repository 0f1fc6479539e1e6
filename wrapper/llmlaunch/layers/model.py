"""A model as a list of layers: which blocks a model's shape has, and where. A kind of block that few models have is
imported for these alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from llmlaunch.columns import IntColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.attention import Attention, SoftmaxAttention, Window
from llmlaunch.layers.block import Block, scaled_columns
from llmlaunch.layers.layer import Branch, Layer
from llmlaunch.layers.matrix import Matrix
from llmlaunch.layers.mlp import Mlp
from llmlaunch.models.sections import BESIDE_ATTENTION
from llmlaunch.models.shape import ModelShape, Multipliers

if TYPE_CHECKING:
    from llmlaunch.layers.mixture import Mixture


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

    @cached_property
    def matrices(self) -> tuple[tuple[Matrix, tuple[int, ...]], ...]:
        """The different matrices of all layers, each with the kinds of layers that have it."""
        kinds: dict[Matrix, list[int]] = {}
        for kind, layer in enumerate(self.kinds):
            for matrix in dict.fromkeys(layer.matrices):
                kinds.setdefault(matrix, []).append(kind)
        return tuple((matrix, tuple(of_kinds)) for matrix, of_kinds in kinds.items())

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
        return next((layer.mixture for layer in self.kinds if layer.mixture is not None), None)

    @cached_property
    def decoder_kinds(self) -> tuple[int, ...]:
        """The kinds that decoder layers are of, in order."""
        return tuple(sorted((*self.classes[0], *self.classes[1])))


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
    """Return the blocks of a layer by its letter (`models.sections.PARTS`)."""
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
                norm_parameters=shape.norm_parameters,
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
    window, convolution = shape.sliding_window, shape.short_convolution
    if convolution is not None and at not in convolution.attention_layers:
        from llmlaunch.layers.short_convolution import short_convolution

        return short_convolution(shape)
    if shape.linear_attention is not None and shape.linear_pattern[at]:
        from llmlaunch.layers.delta_net import delta_net

        return delta_net(shape)
    if shape.compressed_attention is not None:
        return _pooled(shape, shape.compressed_attention.ratios[at])
    if shape.indexer is not None:
        from llmlaunch.layers.sparse_attention import sparse_attention

        return sparse_attention(shape)
    if shape.mla is not None:
        from llmlaunch.layers.latent_attention import latent_attention

        return latent_attention(shape)
    return _attention(shape, full=window is not None and window.full_every > 0 and not (at + 1) % window.full_every)


def _pooled(shape: ModelShape, ratio: int) -> Block:
    from llmlaunch.layers.pooled_attention import pooled_attention

    return pooled_attention(shape, ratio)


def _mamba(shape: ModelShape) -> Block:
    from llmlaunch.layers.mamba import mamba_mixer

    return mamba_mixer(shape)


def _mixture(shape: ModelShape) -> Block:
    from llmlaunch.layers.mixture import mixture_of

    return mixture_of(shape)


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
        norm_vectors=shape.norm_vectors,
        scaled=scaled_columns(
            (constants.attention_input, shape.hidden_size),
            (constants.keys, groups * head_dim),
            (constants.attention_output, shape.hidden_size),
            (constants.residual, shape.hidden_size),
        ),
        scaled_input=constants.attention_input is not None,
    )


def _mlp(shape: ModelShape) -> Mlp:
    constants = shape.multipliers or Multipliers()
    scaled = scaled_columns(
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
