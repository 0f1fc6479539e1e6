"""A mixture of experts in Megatron-LM's words (core 0.19): experts, router, dispatcher."""

from __future__ import annotations

from llmlaunch.backends.argument import Argument, argument, number
from llmlaunch.backends.facts.megatron import FP32_ROUTER_EXPERTS
from llmlaunch.models.shape import ModelShape, MoeShape
from llmlaunch.techniques import Techniques

__all__ = ["mixture_arguments"]

ROUTER = "model.moe.router"


def mixture_arguments(shape: ModelShape, ways: Techniques) -> tuple[Argument, ...]:
    """Empty for a dense model."""
    if shape.moe is None:
        return ()
    moe = shape.moe
    return (*_experts(moe), *_dispatcher(moe, ways), *_router(moe), *_balancing(moe), *_shared(moe, ways), *_some(moe))


def _experts(moe: MoeShape) -> list[Argument]:
    return [
        argument("--num-experts", moe.num_experts, of="model.moe.num_experts"),
        argument("--moe-router-topk", moe.topk, of="model.moe.topk"),
        argument("--moe-ffn-hidden-size", moe.ffn_hidden_size, of="model.moe.ffn_hidden_size"),
    ]


def _dispatcher(moe: MoeShape, ways: Techniques) -> list[Argument]:
    kind = moe.token_dispatcher or "alltoall"
    made = [argument("--moe-token-dispatcher-type", kind, of="layout.token_dispatcher")]
    if kind == "flex":
        backend = ways.flex_backend or "deepep"
        made += [argument("--moe-flex-dispatcher-backend", backend, of="layout.flex_backend")]
    if kind == "flex" or moe.num_experts >= FP32_ROUTER_EXPERTS:
        who = "the flex dispatcher sends" if kind == "flex" else f"{FP32_ROUTER_EXPERTS} experts and more want"
        made += [argument("--moe-router-dtype", "fp32", why=f"{who} fp32 scores")]
    if moe.grouped_gemm is not False:
        made += [argument("--moe-grouped-gemm", why="all experts of a rank in one kernel")]
    return made


def _router(moe: MoeShape) -> list[Argument]:
    """Softmax over the chosen experts' logits is softmax over all, made to sum to 1 again: Megatron's default. Sigmoid
    scores always are. Groups are chosen by the sum of their best topk / group_topk scores
    (megatron/core/transformer/moe/moe_utils.py group_limited_topk, core 0.19)."""
    router, made = moe.router, []
    if router.score_function != "softmax":
        made += [argument("--moe-router-score-function", router.score_function, of=f"{ROUTER}.score_function")]
    elif not router.normalize_topk:
        made += [argument("--moe-router-pre-softmax", of=f"{ROUTER}.normalize_topk")]
    elif moe.topk == 1:
        alone = "one score that sums to 1 would teach the router nothing; Megatron refuses it"
        made += [argument("--moe-router-pre-softmax", of="model.moe.topk", why=alone)]
    if router.groups is not None and router.group_topk is not None:
        made += [argument("--moe-router-num-groups", router.groups, of=f"{ROUTER}.groups")]
        made += [argument("--moe-router-group-topk", router.group_topk, of=f"{ROUTER}.group_topk")]
    if router.scaling_factor != 1.0:
        factor = number(router.scaling_factor)
        made += [argument("--moe-router-topk-scaling-factor", factor, of=f"{ROUTER}.scaling_factor")]
    if router.expert_bias:
        made += [argument("--moe-router-enable-expert-bias", of=f"{ROUTER}.expert_bias")]
    return made


def _balancing(moe: MoeShape) -> list[Argument]:
    kind, key = moe.router.balancing, f"{ROUTER}.balancing"
    made = [argument("--moe-router-load-balancing-type", kind, of=key)]
    if kind == "none":
        return made
    return [*made, argument("--moe-aux-loss-coeff", number(moe.router.aux_loss_coeff), of=f"{ROUTER}.aux_loss_coeff")]


def _shared(moe: MoeShape, ways: Techniques) -> list[Argument]:
    width = moe.shared_expert_ffn_hidden_size
    if not width:
        return []
    key = "model.moe.shared_expert_ffn_hidden_size"
    made = [argument("--moe-shared-expert-intermediate-size", width, of=key)]
    if moe.shared_expert_gate:
        made += [argument("--moe-shared-expert-gate", of="model.moe.shared_expert_gate")]
    if ways.overlap_shared_expert:
        made += [argument("--moe-shared-expert-overlap", of="layout.overlap_shared_expert")]
    return made


def _some(moe: MoeShape) -> list[Argument]:
    """Which layers are mixtures, and how many tokens an expert takes."""
    made = []
    if len(set(moe.layer_pattern)) > 1:
        pattern = ",".join(str(flag) for flag in moe.layer_pattern)
        made += [argument("--moe-layer-freq", f"[{pattern}]", of="model.moe.layer_pattern")]
    if moe.capacity_factor is not None:
        capacity = number(moe.capacity_factor)
        made += [argument("--moe-expert-capacity-factor", capacity, of="model.moe.capacity_factor")]
    return made
