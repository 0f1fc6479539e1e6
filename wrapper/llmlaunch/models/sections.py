"""The sections of a model: how its layers attend and what they do instead, mixtures of experts, constants, a vision
encoder; and how they are made of plain values, as JSON and YAML have them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from math import isqrt
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from pydantic import Field

from llmlaunch.documents.keys import key, section

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


OF_MEMORY = ("score_function", "normalize_topk")  # of a router: whether scores of all experts are kept
OF_TIME = ("groups", "group_topk")  # of a router: over how many devices a token's experts lie


@section
class Router:
    """How tokens choose their experts. All of it changes what is trained, and OF_MEMORY what a step holds."""

    score_function: str = key(
        "What makes scores of logits: the last is the root of softplus",
        default="softmax",
        written=Literal["softmax", "sigmoid", "sqrtsoftplus"],
    )
    groups: Count | None = key("Groups the experts stand in; absent = one", default=None)
    group_topk: Count | None = key("Groups each token goes to, chosen before its experts", default=None)
    scaling_factor: Positive = key("Factor on the routed experts' output", default=1.0)
    # a buffer and no parameter
    expert_bias: bool = key("Balance by a bias on each expert's score (DeepSeek-V3)", default=False)
    normalize_topk: bool = key("Make the chosen scores sum to 1", default=True)
    balancing: str = key(
        "Auxiliary loss that keeps experts evenly used: over the batch, by sequence, or none",
        default="aux_loss",
        written=Literal["aux_loss", "seq_aux_loss", "none"],
    )
    aux_loss_coeff: float = key("Weight of that loss", default=0.01, ge=0, le=100)
    weighted_inputs: bool = key("Scores weigh what experts take in, and not what they put out (Llama 4)", default=False)
    hash_layers: int = key(
        "First layers in which a table of tokens, and no score, chooses experts (DeepSeek-V4)",
        default=0,
        ge=0,
        le=10_000,
    )


@section
class MoeShape:
    """Mixture of experts."""

    num_experts: Count = key("Experts in one layer")
    topk: Count = key("Experts each token goes to")
    ffn_hidden_size: Size = key("Inner width of one expert")
    shared_expert_ffn_hidden_size: int = key("Inner width of the shared expert; 0 = none", default=0, ge=0, le=2**24)
    layer_pattern: tuple[int, ...] = key(
        "1 for each mixture layer, 0 for each dense one; absent = as in the base, else all are mixtures",
        default=(),
        written=tuple[Literal[0, 1], ...] | None,
    )
    capacity_factor: float | None = key(
        "Tokens an expert takes, relative to an even share; absent = none is dropped", default=None, gt=0, le=1000
    )
    grouped_gemm: bool | None = None
    shared_expert_gate: bool = key("A sigmoid of the token weighs the shared expert (Qwen 2)", default=False)
    router: Router = key("How tokens choose their experts; absent = as Mixtral's do", default=Router())
    latent_size: Size | None = key(
        "Width that tokens are projected to before they go to experts; absent = hidden_size (Nemotron 3 Super)",
        default=None,
    )


# the letters of Megatron's --hybrid-layer-pattern and of nemotron_h's hybrid_override_pattern
PARTS: Mapping[str, str] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "mixture"}
BESIDE_ATTENTION = "H"  # a layer of a mixer beside attention, and an MLP behind both

# tokens that the convolution spans, and those of a chunk of the scan (megatron/core/ssm/mamba_mixer.py, core 0.19)
CONV_KERNEL, SCAN_CHUNK = 4, 128
# Megatron core builds no other mixer. Digests and records name what differs from it.
BUILT_BY_CORE: Mapping[str, object] = {
    "convolution_kernel": CONV_KERNEL,
    "convolution_bias": True,
    "chunk": SCAN_CHUNK,
    "gated_norm": True,
}


@section
class Mamba:
    """Layers that are a Mamba-2 mixer (Dao and Gu 2024) among layers that are attention, an MLP or a mixture of experts
    each by itself; or layers with a mixer beside attention."""

    pattern: str = key(
        "The layers in their order: M a Mamba-2 mixer, * attention, - an MLP, E a mixture of experts; or H for each, a "
        "mixer beside attention and an MLP behind both (Falcon-H1)",
        pattern=r"^([M*E-]+|H+)$",
        max_length=10_000,
    )
    num_heads: Count = key("Heads of a Mamba-2 mixer", default=128)
    head_dim: Size = key("Width of one of its heads", default=64)
    state_size: Size = key("Size of the state of each column of a head", default=128)
    groups: Count = key("Groups of heads that read and write their states alike", default=8)
    convolution_kernel: int = key("Tokens that the convolution spans", default=CONV_KERNEL, ge=2, le=64)
    convolution_bias: bool = key("The convolution has a bias", default=True)
    chunk: int = key("Tokens of a chunk of the scan", default=SCAN_CHUNK, ge=1, le=2**16)
    gated_norm: bool = key("A norm behind the gate of what the scan puts out", default=True)
    mtp_pattern: str | None = key(
        "The layers of a multi-token-prediction module, of which mtp_num_layers says the number",
        default=None,
        pattern=r"^[M*E-]+$",
        max_length=100,
    )


Constant = Annotated[float, Field(gt=0, le=1e6)]


@section
class Multipliers:
    """Constants that tensors are multiplied by. A class multiplies by 1, too: a constant that is absent is a product
    that is not there."""

    embedding: Constant | None = key("What the embedding puts out", default=None)
    logits: Constant | None = key("Logits", default=None)
    residual: Constant | None = key("What attention and the MLP add to the residual stream (Granite)", default=None)
    keys: Constant | None = key("Keys, before they are turned", default=None)
    attention_input: Constant | None = key("What attention reads of the norm before it", default=None)
    attention_output: Constant | None = key("What attention adds to the residual stream", default=None)
    mamba_input: Constant | None = key("What a Mamba-2 mixer reads of the norm before it", default=None)
    mamba_parts: tuple[float, ...] | None = key(
        "The parts of its first projection: the gate, what is mixed, how states are written and read, and steps",
        default=None,
        written=tuple[Constant, ...] | None,
        min_length=5,
        max_length=5,
    )
    mamba_output: Constant | None = key("What a Mamba-2 mixer adds to the residual stream", default=None)
    gate: Constant | None = key("The gate of the MLP, before its activation", default=None)
    mlp_output: Constant | None = key("What the MLP adds to the residual stream", default=None)


CHANNELS = 3  # red, green, blue


@section
class Vision:
    """A vision encoder as Qwen3-VL has it: patches of images, blocks with LayerNorms and biases in which the patches of
    an image attend to each other, and a projector that makes one token of each square of patches."""

    depth: int = key("Blocks of the encoder", ge=1, le=10_000)
    hidden_size: Size = key("Width of the encoder's residual stream")
    ffn_hidden_size: Size = key("Inner width of its MLP")
    num_attention_heads: Count = key("Its attention heads")
    patch_size: Count = key("Pixels along one side of a patch", default=16)
    temporal_patch_size: Count = key("Frames of a patch; an image is repeated", default=2)
    merge_size: Count = key("Patches along one side of the square that becomes one token", default=2)
    position_embeddings: Count = key("Learned positions, a square, stretched to each image", default=2304)
    deepstack: tuple[int, ...] = key(
        "Blocks, counted from 0, whose output is added to one of the decoder's first layers each, through a projector "
        "of its own",
        default=(),
    )
    image_size: int | None = key(
        "Pixels along one side of an image as it is cut into patches; absent = those of the learned positions",
        default=None,
        ge=1,
        le=2**16,
    )
    images_per_sample: Count = key("Images in each sequence; their tokens are among the sequence's", default=1)
    frozen: bool = key("Blocks and patch embedding are not trained, projectors are", default=False)

    @property
    def patches_per_image(self) -> int:
        """Patches of one image."""
        if self.image_size is None:
            return isqrt(self.position_embeddings) ** 2
        return (self.image_size // self.patch_size) ** 2

    @property
    def patches_per_sample(self) -> int:
        """Patches of all images of one sequence."""
        return self.images_per_sample * self.patches_per_image

    @property
    def tokens_per_sample(self) -> int:
        """Tokens that the decoder gets of them."""
        return self.patches_per_sample // self.merge_size**2

    @property
    def patch_width(self) -> int:
        """Numbers in one patch."""
        return CHANNELS * self.temporal_patch_size * self.patch_size**2

    @property
    def merged_width(self) -> int:
        """Columns of the patches that become one token."""
        return self.hidden_size * self.merge_size**2

    @property
    def projectors(self) -> int:
        """What makes tokens of patches: one behind the last block, and one for each of `deepstack`."""
        return 1 + len(self.deepstack)


Section = TypeVar("Section")


@cache
def _hints(cls: Any) -> Mapping[str, Any]:
    return get_type_hints(cls)


def _is_optional(cls: Any, item: dataclasses.Field[Any]) -> bool:
    return type(None) in get_args(_hints(cls)[item.name])


def _has_default(item: dataclasses.Field[Any]) -> bool:
    return item.default is not MISSING or item.default_factory is not MISSING


@cache
def sections_of(cls: Any) -> Mapping[str, type[Any]]:
    """Return the fields of a section that are sections themselves, with the class of each."""
    return {
        name: member
        for name, hint in _hints(cls).items()
        for member in (hint, *get_args(hint))
        if isinstance(member, type) and is_dataclass(member)
    }


@cache
def required_keys(cls: Any) -> tuple[str, ...]:
    """Return the fields that a section cannot be without."""
    return tuple(item.name for item in fields(cls) if not _has_default(item) and not _is_optional(cls, item))


def section_from(cls: type[Section], values: Mapping[str, Any]) -> Section:
    """Return a section of plain values: mappings become sections, lists tuples, and null is a field that is absent.
    Raises TypeError for a field that there is not."""
    of_class: Any = cls
    sections = sections_of(of_class)
    chosen: dict[str, Any] = dict.fromkeys(_nullable(of_class))
    for name, value in values.items():
        if isinstance(value, Mapping) and name in sections:
            chosen[name] = section_from(sections[name], value)
        elif value is not None:
            chosen[name] = tuple(value) if isinstance(value, list) else value
    return cls(**chosen)


@cache
def _nullable(cls: Any) -> tuple[str, ...]:
    """Return the fields without a default that may be None."""
    return tuple(item.name for item in fields(cls) if not _has_default(item) and _is_optional(cls, item))
