"""The kinds of attention that layers of one model have, each as a shape of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from llmlaunch.frozen import frozen
from llmlaunch.models.attention import CompressedAttention
from llmlaunch.models.shape import ModelShape

__all__ = ["AttentionKind", "attention_kinds", "is_mixed", "kind_shares"]


@frozen
class AttentionKind:
    """The model as if all its layers had attention of one kind, and 1 for each layer that has it. `predicts` is the
    kind of the layers for multi-token prediction."""

    shape: ModelShape
    layers: tuple[int, ...]
    predicts: bool


def is_mixed(shape: ModelShape) -> bool:
    """Whether softmax attention of some layers is of another kind than that of others: pooled by another ratio."""
    compressed = shape.compressed_attention
    return compressed is not None and len(_ratios(compressed, shape.mtp_num_layers)) > 1


@cache
def attention_kinds(shape: ModelShape) -> tuple[AttentionKind, ...]:
    """Return the kinds of softmax attention among the layers; what stands beside it, such as delta nets, is none."""
    compressed = shape.compressed_attention
    if compressed is None or not is_mixed(shape):
        return (AttentionKind(shape, (1,) * shape.num_layers, True),)
    ratios = _ratios(compressed, shape.mtp_num_layers)
    return tuple(_pooling(shape, compressed, ratio) for ratio in ratios)


def _ratios(compressed: CompressedAttention, prediction_layers: int) -> tuple[int, ...]:
    """Return the ratios that occur. A layer for multi-token prediction pools nothing (Megatron-Bridge
    067f987d, models/deepseek/deepseek_v4_bridge.py _dsv4_compress_ratios)."""
    return tuple(sorted({*compressed.ratios, *((0,) if prediction_layers else ())}))


def _pooling(shape: ModelShape, compressed: CompressedAttention, ratio: int) -> AttentionKind:
    alike = replace(compressed, ratios=(ratio,) * shape.num_layers)
    layers = tuple(int(each == ratio) for each in compressed.ratios)
    return AttentionKind(replace(shape, compressed_attention=alike, mtp_num_layers=0), layers, ratio == 0)


def kind_shares(shape: ModelShape) -> tuple[tuple[ModelShape, float], ...]:
    """Return each kind's shape and the share of all layers that have it."""
    return tuple((kind.shape, sum(kind.layers) / shape.num_layers) for kind in attention_kinds(shape))
