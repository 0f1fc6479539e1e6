"""Sections of a model that say how its layers attend, or what they do instead: windows, positions, latents, chosen
keys, delta nets, convolutions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmlaunch.documents.keys import key, section
from llmlaunch.documents.validate import BadKey
from llmlaunch.rundir.values import counted

__all__ = [
    "CompressedAttention",
    "Count",
    "Indexer",
    "LinearAttention",
    "MlaShape",
    "Positions",
    "Positive",
    "Rate",
    "RopeScaling",
    "ShortConvolutionShape",
    "Size",
    "SlidingWindow",
    "check_compressed",
    "check_indexer",
    "check_short_convolution",
]

Size = Annotated[int, Field(ge=1, le=2**24)]
Count = Annotated[int, Field(ge=1, le=2**16)]
Positions = Annotated[int, Field(ge=1, le=2**28)]
Rate = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, le=1e12)]


@section
class RopeScaling:
    """Rotary frequencies changed for sequences longer than those of the first training, in the words of transformers
    5.23 (modeling_rope_utils.py). None where the framework works a value out."""

    kind: str = key("Method", written=Literal["linear", "llama3", "yarn"])
    factor: float = key("How much longer sequences became", ge=1, le=1e6)
    original_max_position_embeddings: Positions | None = key("Longest sequence before", default=None)
    low_frequency_factor: Positive = key("llama3: frequencies below this are divided by factor", default=1.0)
    high_frequency_factor: Positive = key("llama3: frequencies above this stay", default=4.0)
    beta_fast: Positive = key("yarn: rotations above which frequencies stay", default=32.0)
    beta_slow: Positive = key("yarn: rotations below which they are divided by factor", default=1.0)
    mscale: Positive | None = key("yarn: weight of the scores' scaling", default=None)
    mscale_all_dim: Positive | None = key("yarn: the same over all of a head", default=None)
    attention_factor: Positive | None = key("yarn: the scores' scaling itself", default=None)
    truncate: bool = key("yarn: round the bounds between frequencies to whole ones", default=True)


@section
class SlidingWindow:
    """Layers that attend to the last tokens alone."""

    tokens: Positions = key("Tokens a windowed layer attends to")
    full_every: int = key(
        "Every so many layers one attends to the whole sequence; 0 = none does", default=0, ge=0, le=10_000
    )
    rotary_base: Positive | None = key("Rotary base of the windowed layers; absent = that of all layers", default=None)
    chunked: bool = key("Pieces of so many tokens see themselves alone (Llama 4)", default=False)
    full_head_dim: Size | None = key(
        "Width of a head in layers that see everything; absent = as in the others (Gemma 4)", default=None
    )
    full_query_groups: Count | None = key(
        "Key/value heads of layers that see everything; absent = as in the others (Gemma 4)", default=None
    )
    full_rotary_percent: float = key(
        "Share of each head that rotary positions turn in layers that see everything", default=1.0, gt=0, le=1
    )


@section
class LinearAttention:
    """Layers whose attention is a gated delta net (Yang, Kautz and Hatamizadeh 2024): a state of fixed size in place of
    scores, behind a convolution over neighbouring tokens."""

    full_every: int = key("Every so many layers one has ordinary attention; 0 = none has", default=4, ge=0, le=10_000)
    num_key_heads: Count = key("Heads of queries and of keys", default=16)
    num_value_heads: Count = key("Heads of values and of the gate, a multiple of the key heads", default=32)
    key_head_dim: Size = key("Width of a query's and a key's head", default=128)
    value_head_dim: Size = key("Width of a value's head", default=128)
    conv_kernel: int = key("Tokens that the convolution spans", default=4, ge=1, le=64)


@section
class ShortConvolutionShape:
    """Layers with a gated short convolution in place of attention (LFM2): each column of a token is mixed with the few
    tokens before it, between two gates."""

    attention_layers: tuple[int, ...] = key(
        "The layers that have attention, counted from 0; those beyond the last are none",
        written=tuple[Annotated[int, Field(ge=0, le=10_000)], ...],
    )
    kernel: int = key("Tokens that the convolution spans", default=3, ge=1, le=64)
    bias: bool = key("Biases on the convolution and both projections around it", default=False)


@section
class MlaShape:
    """Multi-latent attention (DeepSeek-V2 and V3), in Megatron's names."""

    q_lora_rank: Size | None = key("Width of the queries' latent; absent = queries have none")
    kv_lora_rank: Size = key("Width of the latent of keys and values")
    qk_head_dim: Size = key("Width of a query's and a key's head, without rotary positions")
    qk_pos_emb_head_dim: Size = key("Width of the part with rotary positions")
    v_head_dim: Size = key("Width of a value's head")


@section
class Indexer:
    """What chooses the keys that each query of latent attention attends to (DeepSeek-V3.2's lightning indexer): small
    heads of its own score all keys."""

    heads: Count = key("Heads that score")
    head_dim: Size = key("Width of one of them")
    topk: Positions = key("Keys a query attends to")
    interleaved: bool = key("Rotary positions turn neighbours, and not halves of a head (GLM-5)", default=False)
    loss_coeff: float = key(
        "Weight of the loss that teaches it to choose as attention does", default=0.001, gt=0, le=100
    )


@section
class CompressedAttention:
    """Attention of DeepSeek-V4: all heads share one key, which is the value, too. A query sees the last tokens as they
    are, and those before them pooled into fewer keys; where four are pooled into one, an indexer chooses among them."""

    ratios: tuple[int, ...] = key(
        "Tokens pooled into one key, layer by layer; 0 = a layer sees the last tokens alone",
        written=tuple[Literal[0, 4, 128], ...],
    )
    q_lora_rank: Size = key("Width of the queries' latent")
    output_groups: Count = key("Groups of heads, each projected by itself before all are projected together")
    output_rank: Size = key("Width that one group is projected to")
    index_heads: Count = key("Heads of the indexer")
    index_head_dim: Size = key("Width of one of them")
    index_topk: Positions = key("Pooled keys that a query chooses")
    window: Positions = key("Tokens that a query sees as they are", default=128)
    rotary_base: Positive = key("Rotary base of layers that pool", default=160000.0)
    index_loss_coeff: float = key(
        "Weight of the loss that teaches the indexer to choose as attention does", default=0.01, gt=0, le=100
    )


def check_indexer(indexer: Indexer, mla: MlaShape | None) -> None:
    if mla is None or mla.q_lora_rank is None:
        raise BadKey(("indexer",), "scores are made of the queries' latent; give mla with a q_lora_rank, or remove it")
    if indexer.head_dim < mla.qk_pos_emb_head_dim:
        raise BadKey(
            ("indexer", "head_dim"), f"must hold the {mla.qk_pos_emb_head_dim} rotary columns, not {indexer.head_dim}"
        )


def check_short_convolution(convolution: ShortConvolutionShape, layers: int) -> None:
    """Raise `BadKey` where none of the `layers` has a convolution."""
    if {*range(layers)} <= {*convolution.attention_layers}:
        raise BadKey(
            ("short_convolution", "attention_layers"), "leaves no layer with a convolution; remove the section"
        )


def check_compressed(compressed: CompressedAttention, layers: int, heads: int, groups: int) -> None:
    """Raise `BadKey` for what does not agree with the number of `layers`, of `heads` and of key/value `groups`."""
    ratios = len(compressed.ratios)
    if ratios != layers:
        raise BadKey(
            ("compressed_attention", "ratios"),
            f"has {counted(ratios, 'ratio')} for {counted(layers, 'layer')}; give one per layer",
        )
    if heads % compressed.output_groups:
        raise BadKey(
            ("compressed_attention", "output_groups"),
            f"must divide the {heads} attention heads, not {compressed.output_groups}",
        )
    if groups != 1:
        raise BadKey(("num_query_groups",), f"all heads share one key in compressed attention: must be 1, not {groups}")
