"""The kinds of layers and of attention that one model has; each kind of attention as a shape of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from llmlaunch.frozen import frozen
from llmlaunch.models.attention import CompressedAttention, SlidingWindow
from llmlaunch.models.mamba import PARTS
from llmlaunch.models.shape import ModelShape

__all__ = ["attention_kinds", "head_kinds", "kind_shares", "layer_parts"]


@frozen
class AttentionKind:
    """The model as if all its layers had attention of one kind, and 1 for each layer that has it. `predicts` is the
    kind of the layers for multi-token prediction."""

    shape: ModelShape
    layers: tuple[int, ...]
    predicts: bool


def _is_mixed(shape: ModelShape) -> bool:
    """Whether softmax attention of some layers is of another kind than that of others: pooled by another ratio, or with
    other heads where they see everything."""
    compressed, window = shape.compressed_attention, shape.sliding_window
    if compressed is not None:
        return len(_ratios(compressed, shape.mtp_num_layers)) > 1
    return window is not None and 0 < window.full_every <= shape.num_layers and _other_heads(shape, window)


def _other_heads(shape: ModelShape, window: SlidingWindow) -> bool:
    others = (window.full_head_dim, window.full_query_groups)
    return any(each is not None for each in others) or window.full_rotary_percent != 1.0 or shape.keys_are_values


@cache
def attention_kinds(shape: ModelShape) -> tuple[AttentionKind, ...]:
    """Return the kinds of softmax attention among the layers; what stands beside it, such as delta nets, is none."""
    compressed, window = shape.compressed_attention, shape.sliding_window
    if not _is_mixed(shape):
        return (AttentionKind(shape, (1,) * shape.num_layers, True),)
    if compressed is not None:
        return tuple(_pooling(shape, compressed, ratio) for ratio in _ratios(compressed, shape.mtp_num_layers))
    assert window is not None
    return _windowed(shape, window)


def _ratios(compressed: CompressedAttention, prediction_layers: int) -> tuple[int, ...]:
    """Return the ratios that occur. A layer for multi-token prediction pools nothing (Megatron-Bridge
    067f987d, models/deepseek/deepseek_v4_bridge.py _dsv4_compress_ratios)."""
    return tuple(sorted({*compressed.ratios, *((0,) if prediction_layers else ())}))


def _pooling(shape: ModelShape, compressed: CompressedAttention, ratio: int) -> AttentionKind:
    alike = replace(compressed, ratios=(ratio,) * shape.num_layers)
    layers = tuple(int(each == ratio) for each in compressed.ratios)
    return AttentionKind(replace(shape, compressed_attention=alike, mtp_num_layers=0), layers, ratio == 0)


def _windowed(shape: ModelShape, window: SlidingWindow) -> tuple[AttentionKind, ...]:
    """Layers with a window, and those that see everything, with heads of their own (Gemma 4)."""
    full = tuple(int(not (i + 1) % window.full_every) for i in range(shape.num_layers))
    local = SlidingWindow(window.tokens, rotary_base=window.rotary_base, chunked=window.chunked)
    whole = replace(
        shape,
        sliding_window=None,
        head_dim=window.full_head_dim or shape.head_dim,
        num_query_groups=window.full_query_groups or shape.num_query_groups,
        rotary_percent=window.full_rotary_percent,
    )
    windowed = replace(shape, sliding_window=local, keys_are_values=False)
    parts = (windowed, tuple(1 - each for each in full)), (whole, full)
    return tuple(AttentionKind(kind, layers, bool(layers[-1])) for kind, layers in parts)


def kind_shares(shape: ModelShape) -> tuple[tuple[ModelShape, float], ...]:
    """Return each kind's shape and the share of all layers that have it."""
    return tuple((kind.shape, sum(kind.layers) / shape.num_layers) for kind in attention_kinds(shape))


def layer_parts(shape: ModelShape) -> tuple[str, ...]:
    """Return what each layer has in the place of attention: attention itself, "linear" (a gated delta net) or "mamba";
    of a model whose layers have one part each also "mlp" and "mixture"."""
    if shape.mamba is not None:
        return tuple(PARTS[letter] for letter in shape.mamba.pattern)
    return tuple("linear" if linear else "attention" for linear in shape.linear_pattern)


def head_kinds(shape: ModelShape) -> tuple[int, int]:
    """Return how many layers of a multi-token-prediction module are no mixtures and how many are: those of its own
    pattern, or one like the model's last (megatron/core/transformer/multi_token_prediction.py, core 0.19)."""
    if shape.mamba is not None:
        mixtures = (shape.mamba.mtp_pattern or "").count("E")
        return len(shape.mamba.mtp_pattern or "") - mixtures, mixtures
    mixture = int(shape.moe is not None and shape.moe.layer_pattern[-1])
    return 1 - mixture, mixture
