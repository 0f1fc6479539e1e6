"""What the sizes of a model must agree on."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

from llmlaunch.documents.validate import BadKey
from llmlaunch.models.sections import (
    BESIDE_ATTENTION,
    CompressedAttention,
    Indexer,
    LinearAttention,
    Mamba,
    MlaShape,
    MoeShape,
    ShortConvolutionShape,
    Vision,
)
from llmlaunch.models.shape import ModelShape
from llmlaunch.rundir.values import counted


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


def check_mamba(mamba: Mamba, layers: int, mixtures: Sequence[int] | None, mtp_num_layers: int) -> None:
    """Raise `BadKey` for what does not agree with the rest of the model: its layers, those of them that are `mixtures`
    (None of a dense model) and its modules for multi-token prediction."""
    letters = len(mamba.pattern)
    if letters != layers:
        raise BadKey(
            ("mamba", "pattern"),
            f"has {counted(letters, 'letter')} for {counted(layers, 'layer')}; give one per layer",
        )
    if "M" not in mamba.pattern and BESIDE_ATTENTION not in mamba.pattern:
        raise BadKey(("mamba", "pattern"), "has no Mamba-2 mixer (M); remove the section")
    if mamba.num_heads % mamba.groups:
        raise BadKey(("mamba", "groups"), f"must divide the {mamba.num_heads} heads, not be {mamba.groups}")
    written = [int(letter == "E") for letter in mamba.pattern]
    if mixtures is None and (any(written) or "E" in (mamba.mtp_pattern or "")):
        raise BadKey(("mamba", "pattern"), "has mixtures (E), and the model has no moe; give it, or write -")
    if mixtures is not None and list(mixtures) != written:
        raise BadKey(("moe", "layer_pattern"), "says other layers than the letters E of mamba.pattern; leave it out")
    if mtp_num_layers and mamba.mtp_pattern is None:
        raise BadKey(("mamba", "mtp_pattern"), "is missing for mtp_num_layers; give the layers of a module")


def check_mixture(moe: MoeShape, layers: int) -> None:
    router = moe.router
    if moe.topk > moe.num_experts:
        raise BadKey(("moe", "topk"), f"must be at most num_experts ({moe.num_experts}), not {moe.topk}")
    if len(moe.layer_pattern) != layers:
        raise BadKey(
            ("moe", "layer_pattern"),
            f"has {len(moe.layer_pattern)} entries for {counted(layers, 'layer')}; give one per layer",
        )
    if moe.shared_expert_gate and not moe.shared_expert_ffn_hidden_size:
        raise BadKey(
            ("moe", "shared_expert_gate"), "there is no shared expert to weigh; give shared_expert_ffn_hidden_size"
        )
    if (router.groups is None) != (router.group_topk is None):
        missing = "group_topk" if router.group_topk is None else "groups"
        raise BadKey(("moe", "router", missing), "groups and group_topk go together; give both or neither")
    if router.groups is not None and router.group_topk is not None:
        _check_groups(moe, router.groups, router.group_topk)


def _check_groups(moe: MoeShape, groups: int, group_topk: int) -> None:
    if moe.num_experts % groups:
        raise BadKey(
            ("moe", "router", "groups"), f"must divide the {moe.num_experts} experts into equal groups, not {groups}"
        )
    if group_topk > groups or group_topk * (moe.num_experts // groups) < moe.topk:
        raise BadKey(
            ("moe", "router", "group_topk"),
            f"{group_topk} of {groups} groups of {moe.num_experts // groups} experts cannot hold {moe.topk} choices",
        )


def check_vision(vision: Vision, layers: int) -> None:
    """Raise `BadKey` for sizes of the encoder that do not agree with each other, or with the decoder's `layers`."""
    if vision.hidden_size % vision.num_attention_heads:
        raise BadKey(
            ("vision", "num_attention_heads"),
            f"must divide hidden_size {vision.hidden_size}, not be {vision.num_attention_heads}",
        )
    square = vision.patch_size * vision.merge_size
    if vision.image_size is not None and vision.image_size % square:
        raise BadKey(
            ("vision", "image_size"),
            f"must be a multiple of {square} (patch_size x merge_size), not {vision.image_size}",
        )
    side = isqrt(vision.position_embeddings)
    if side**2 != vision.position_embeddings or (vision.image_size is None and side % vision.merge_size):
        raise BadKey(
            ("vision", "position_embeddings"),
            f"must be the square of a multiple of merge_size ({vision.merge_size}), not {vision.position_embeddings}",
        )
    if len(set(vision.deepstack)) != len(vision.deepstack) or not all(
        0 <= at < vision.depth for at in vision.deepstack
    ):
        raise BadKey(("vision", "deepstack"), f"must name different blocks from 0 to {vision.depth - 1}")
    if len(vision.deepstack) > layers:
        raise BadKey(("vision", "deepstack"), f"names more blocks than the decoder has layers ({layers})")


def check_shape(shape: ModelShape) -> ModelShape:
    """Return `shape` if its sizes agree with each other. Raises `BadKey` for the size that does not."""
    heads, groups = shape.num_attention_heads, shape.num_query_groups
    if heads % groups:
        raise BadKey(
            ("num_query_groups",),
            f"{heads} attention heads cannot be shared evenly among {groups} query groups; "
            f"num_query_groups must divide num_attention_heads",
        )
    turned = shape.head_dim if shape.mla is None else shape.mla.qk_pos_emb_head_dim
    if turned % 2 and (shape.position_embedding == "rope" or shape.mla is not None):
        place = ("head_dim",) if shape.mla is None else ("mla", "qk_pos_emb_head_dim")
        raise BadKey(place, f"must be even for rotary positions, not {turned}")
    if shape.indexer is not None:
        check_indexer(shape.indexer, shape.mla)
    if shape.norms_after_alone and shape.post_norms:
        raise BadKey(("norms_after_alone",), "post_norms says that there are norms before, too; remove one of the two")
    if shape.qk_norm_of_all_heads and not shape.qk_layernorm:
        raise BadKey(("qk_norm_of_all_heads",), "there are no norms on queries and keys; set qk_layernorm: true")
    if shape.qk_l2_norm and (shape.qk_layernorm or shape.mla is not None):
        raise BadKey(("qk_l2_norm",), "queries and keys have norms with a weight already; remove one of the two")
    if shape.no_rope_every and (shape.mla is not None or shape.position_embedding != "rope"):
        raise BadKey(("no_rope_every",), "there are no rotary positions of whole heads to leave out; remove it")
    if shape.temperature_tuning and not shape.no_rope_every:
        raise BadKey(("temperature_tuning",), "all layers have rotary positions; set no_rope_every, or remove it")
    if shape.rope_scaling is not None and shape.position_embedding != "rope":
        raise BadKey(("rope_scaling",), f"scales rotary positions, and these are {shape.position_embedding}; remove it")
    window = shape.sliding_window
    if window is not None and window.full_every == 1:
        raise BadKey(("sliding_window", "full_every"), "1 leaves no windowed layer; remove sliding_window")
    if window is not None and window.full_query_groups is not None and heads % window.full_query_groups:
        raise BadKey(
            ("sliding_window", "full_query_groups"),
            f"must divide the {heads} attention heads, not {window.full_query_groups}",
        )
    if shape.moe is not None:
        check_mixture(shape.moe, shape.num_layers)
    if shape.linear_attention is not None:
        _check_linear(shape, shape.linear_attention)
    if shape.short_convolution is not None:
        check_short_convolution(shape.short_convolution, shape.num_layers)
        _alone(shape, "short_convolution")
    if shape.activation_limit is not None and (shape.activation != "silu" or not shape.gated_mlp):
        raise BadKey(("activation_limit",), "there is no SwiGLU to limit; remove it")
    if shape.compressed_attention is not None:
        check_compressed(shape.compressed_attention, shape.num_layers, heads, groups)
        _alone(shape, "compressed_attention")
    if shape.mamba is not None:
        check_mamba(shape.mamba, shape.num_layers, shape.moe.layer_pattern if shape.moe else None, shape.mtp_num_layers)
        _check_one_part(shape)
    if shape.vision is not None:
        check_vision(shape.vision, shape.num_layers)
    if shape.mtp_repeated and not shape.mtp_num_layers:
        raise BadKey(("mtp_repeated",), "there is no module to repeat; set mtp_num_layers, or remove it")
    if shape.attention_gate and shape.mla is not None:
        raise BadKey(("attention_gate",), "latent attention has no gate; remove one of the two")
    return shape


def _check_linear(shape: ModelShape, linear: LinearAttention) -> None:
    if linear.full_every == 1:
        raise BadKey(("linear_attention", "full_every"), "1 leaves no layer with linear attention; remove the section")
    if linear.num_value_heads % linear.num_key_heads:
        raise BadKey(
            ("linear_attention", "num_value_heads"),
            f"must be a multiple of num_key_heads ({linear.num_key_heads}), not {linear.num_value_heads}",
        )
    _alone(shape, "linear_attention")
    if shape.linear_bias or shape.qkv_bias:
        raise BadKey(("linear_bias",), "linear attention has no biases; set linear_bias and qkv_bias to false")


def _check_one_part(shape: ModelShape) -> None:
    _alone(shape, "mamba")
    if shape.linear_bias or shape.qkv_bias:
        raise BadKey(("linear_bias",), "Mamba-2 mixers have no biases; set linear_bias and qkv_bias to false")
    for name in ("post_norms", "norms_after_alone"):
        if getattr(shape, name):
            raise BadKey((name,), "layers with Mamba-2 mixers have norms before their parts alone; remove it")


def _alone(shape: ModelShape, section: str) -> None:
    """Raise `BadKey` for another kind of attention beside the one that `section` says."""
    for name in ("mla", "sliding_window", "linear_attention", "short_convolution", "compressed_attention"):
        if name != section and getattr(shape, name) is not None:
            raise BadKey((name,), f"stands beside {section} in no known model; remove one of the two")
