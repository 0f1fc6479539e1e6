"""Whether the sizes of a model agree with each other."""

from __future__ import annotations

from llmlaunch.documents.validate import BadKey
from llmlaunch.models.shape import ModelShape, MoeShape
from llmlaunch.rundir.messages import counted

__all__ = ["check_shape"]


def check_shape(shape: ModelShape) -> ModelShape:
    """`shape`, if its sizes agree with each other. Raises `BadKey` naming the size that does not."""
    heads, groups = shape.num_attention_heads, shape.num_query_groups
    if heads % groups:
        raise BadKey(
            ("num_query_groups",),
            f"{heads} attention heads cannot be shared evenly among {groups} query groups; "
            f"num_query_groups must divide num_attention_heads",
        )
    if shape.position_embedding == "rope" and shape.mla is None and shape.head_dim % 2:
        raise BadKey(("head_dim",), f"must be even for rotary positions, not {shape.head_dim}")
    if shape.mla is not None and shape.mla.qk_pos_emb_head_dim % 2:
        raise BadKey(
            ("mla", "qk_pos_emb_head_dim"), f"must be even for rotary positions, not {shape.mla.qk_pos_emb_head_dim}"
        )
    if shape.rope_scaling is not None and shape.position_embedding != "rope":
        raise BadKey(("rope_scaling",), f"scales rotary positions, and these are {shape.position_embedding}; remove it")
    window = shape.sliding_window
    if window is not None and window.full_every == 1:
        raise BadKey(("sliding_window", "full_every"), "1 leaves no windowed layer; remove sliding_window")
    if shape.moe is not None:
        _check_mixture(shape.moe, shape.num_layers)
    return shape


def _check_mixture(moe: MoeShape, layers: int) -> None:
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
