"""A mixture of experts in place of a layer's MLP, and how tokens choose their experts."""

from __future__ import annotations

from typing import Literal

from llmlaunch.documents.keys import key, section
from llmlaunch.documents.validate import BadKey
from llmlaunch.models.attention import Count, Positive, Size
from llmlaunch.rundir.values import counted

__all__ = ["OF_MEMORY", "OF_TIME", "MoeShape", "Router", "check_mixture"]


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
