"""Mixtures of experts: their sizes, how tokens are sent, the router, shared experts."""

from __future__ import annotations

from llmlaunch.frameworks.argument import number
from llmlaunch.frameworks.megatron.facts import FP32_ROUTER_EXPERTS
from llmlaunch.frameworks.megatron.fixed_rows import INTERLEAVED
from llmlaunch.frameworks.megatron.flags.row import (
    PARSED,
    PATTERN,
    Explained,
    Flag,
    PlannedJob,
    SinceThen,
    Space,
    alias,
    chosen,
    flag,
    one_of,
    within,
)
from llmlaunch.models.shape import SQUARED

ROUTER = "model.moe.router"
ROWS, STASH = "layout.expert_rank_capacity_factor", "layout.paged_stash"
DISPATCH_LIBRARY = "moe_flex_dispatcher_backend"
KNOWN_LIBRARIES = {"deepep", "hybridep"}
OTHER_SCORES = ("sigmoid", "sqrtsoftplus")
USUAL_TOPK, USUAL_COEFFICIENT = 2, 0.01  # --moe-router-topk's default, and that of the recipe's aux_loss_coeff


def _is_mixture(job: PlannedJob) -> bool:
    return job.shape.moe is not None


def _has_experts(space: Space) -> bool:
    return bool(space.get("num_experts"))


def _dispatcher(job: PlannedJob) -> str:
    return job.techniques.token_dispatcher or "alltoall"


def _library(job: PlannedJob) -> object:
    return job.techniques.flex_backend or "deepep" if _dispatcher(job) == "flex" else None


def _score_format(job: PlannedJob) -> object:
    moe = job.shape.moe
    if moe is None or not (_dispatcher(job) == "flex" or moe.num_experts >= FP32_ROUTER_EXPERTS):
        return None
    who = "the flex dispatcher sends" if _dispatcher(job) == "flex" else f"{FP32_ROUTER_EXPERTS} experts and more want"
    return Explained("fp32", why=f"{who} fp32 scores")


def _grouped(job: PlannedJob) -> bool:
    return job.shape.moe is not None and job.shape.moe.grouped_gemm is not False


SENT = "moe_token_dispatcher_type"


def _sent_by(space: Space) -> object:
    return space.get(SENT) if space.get(SENT) in ("allgather", "flex") else None


def _hybrid_library(space: Space) -> bool:
    return space.get(SENT) == "flex" and space.get(DISPATCH_LIBRARY) == "hybridep"


DISPATCH_FLAGS: tuple[Flag, ...] = (
    flag("--moe-token-dispatcher-type", "layout.token_dispatcher", write=_dispatcher, read=_sent_by),
    flag(
        "--moe-flex-dispatcher-backend",
        "layout.flex_backend",
        write=_library,
        read=lambda space: space[DISPATCH_LIBRARY] if _hybrid_library(space) else None,
        unsaid=lambda values: not {*values} <= KNOWN_LIBRARIES,
        subject="library that dispatches tokens",
    ),
    chosen("--moe-router-dtype", _score_format, why="many experts want fp32 scores", added=True),
    chosen("--moe-grouped-gemm", why="all experts of a rank in one kernel", when=_grouped, added=True),
)


def _fixed(space: Space) -> bool:
    return _hybrid_library(space) and (space.get("moe_expert_rank_capacity_factor") or 0) >= 1


def _pages(space: Space) -> bool:
    """Pages sized by what a first step happens to receive (a negative factor) have no size before a job runs; they are
    left out."""
    device, host = (space.get(f"moe_paged_stash_buffer_size_factor_{where}") for where in ("cuda", "cpu"))
    stashed = _fixed(space) and bool(space.get("moe_paged_stash"))
    return stashed and device is not None and host is not None and device > 0 and host >= 0


def _has_rows(job: PlannedJob) -> bool:
    return job.techniques.expert_rank_capacity_factor is not None


def _has_stash(job: PlannedJob) -> bool:
    return job.techniques.paged_stash is not None


FIXED_ROW_FLAGS: tuple[Flag, ...] = (
    flag(
        "--moe-expert-rank-capacity-factor",
        ROWS,
        when=_has_rows,
        read=lambda space: space["moe_expert_rank_capacity_factor"] if _fixed(space) else None,
        since=SinceThen(
            "fixed-rows-since-0.19",
            lambda recipe: recipe.techniques.expert_rank_capacity_factor is not None,
            where="megatron/core/transformer/transformer_config.py, core 0.16",
        ),
    ),
    chosen(
        "--use-transformer-engine-op-fuser",
        keys=ROWS,
        why="all experts of a device are one kernel",
        when=_has_rows,
        subject="fusions and kernels",
    ),
    chosen(
        "--moe-mlp-glu-interleave-size",
        INTERLEAVED,
        keys=ROWS,
        why="as that kernel wants gate and up",
        when=_has_rows,
        subject="fusions and kernels",
    ),
    flag("--moe-paged-stash", STASH, write=lambda job: True, when=_has_stash, reads={}),
    *within(
        _pages,
        flag("--moe-paged-stash-page-size", f"{STASH}.page_size", keeps_default=True, decides=STASH),
        flag("--moe-paged-stash-buffer-size-factor-cuda", f"{STASH}.device_factor", keeps_default=True, decides=STASH),
        flag("--moe-paged-stash-buffer-size-factor-cpu", f"{STASH}.host_factor", keeps_default=True, decides=STASH),
        when=_has_stash,
    ),
)


def _score_function(job: PlannedJob) -> object:
    kind = job.value(f"{ROUTER}.score_function")
    return kind if kind != "softmax" else None


def _scores_first(job: PlannedJob) -> object:
    """Softmax over the chosen experts' logits is softmax over all, made to sum to 1 again: Megatron's default. Sigmoid
    scores always are."""
    moe = job.shape.moe
    if moe is None or moe.router.score_function != "softmax":
        return None
    if not moe.router.normalize_topk:
        return True
    alone = "one score that sums to 1 would teach the router nothing; Megatron refuses it"
    return Explained(True, ("model.moe.topk",), alone) if moe.topk == 1 else None


def _read_scores_first(space: Space) -> object:
    softmax = space.get("moe_router_score_function") not in OTHER_SCORES
    several = (space.get("moe_router_topk") or USUAL_TOPK) > 1
    return False if softmax and space.get("moe_router_pre_softmax") and several else None


def _group_topk(space: Space) -> object:
    groups = space.get("moe_router_num_groups")
    return space.get("moe_router_group_topk") or groups if groups else None


def _scaling(space: Space) -> object:
    factor = space.get("moe_router_topk_scaling_factor")
    return factor if factor not in (None, 1.0) else None


def _balancing(space: Space) -> object:
    kind = space.get("moe_router_load_balancing_type")
    return kind if kind in ("seq_aux_loss", "none") else None


def _balanced(job: PlannedJob) -> bool:
    return job.shape.moe is not None and job.shape.moe.router.balancing != "none"


def _coefficient(space: Space) -> object:
    weight, balanced = space.get("moe_aux_loss_coeff"), space.get("moe_router_load_balancing_type") != "none"
    return weight if balanced and isinstance(weight, float) and weight != USUAL_COEFFICIENT else None


# Groups are chosen by the sum of their best topk / group_topk scores (megatron/core/transformer/moe/moe_utils.py
# group_limited_topk, core 0.19).
ROUTER_FLAGS: tuple[Flag, ...] = (
    flag(
        "--moe-router-score-function",
        f"{ROUTER}.score_function",
        write=_score_function,
        read=lambda space: (
            space["moe_router_score_function"] if space.get("moe_router_score_function") in OTHER_SCORES else None
        ),
    ),
    flag(
        "--moe-router-pre-softmax",
        f"{ROUTER}.normalize_topk",
        write=_scores_first,
        read=_read_scores_first,
        added="one score that sums to 1 would teach the router nothing",
    ),
    flag("--moe-router-num-groups", f"{ROUTER}.groups", read=lambda space: space.get("moe_router_num_groups") or None),
    flag("--moe-router-group-topk", f"{ROUTER}.group_topk", read=_group_topk),
    flag(
        "--moe-router-topk-scaling-factor",
        f"{ROUTER}.scaling_factor",
        form=lambda factor: number(factor) if factor != 1.0 else None,
        read=_scaling,
    ),
    flag("--moe-apply-probs-on-input", f"{ROUTER}.weighted_inputs", subject="experts that are not priced"),
    flag("--moe-router-enable-expert-bias", f"{ROUTER}.expert_bias"),
    flag(
        "--moe-router-load-balancing-type",
        f"{ROUTER}.balancing",
        (("model.moe_router_load_balancing_type", one_of),),
        read=_balancing,
        unread="a recipe knows aux_loss, seq_aux_loss and none",
    ),
    flag(
        "--moe-aux-loss-coeff",
        f"{ROUTER}.aux_loss_coeff",
        (("model.moe_aux_loss_coeff", one_of),),
        when=_balanced,
        read=_coefficient,
    ),
)


def _is_shared(job: PlannedJob) -> bool:
    return job.shape.moe is not None and bool(job.shape.moe.shared_expert_ffn_hidden_size)


def _shared(space: Space) -> bool:
    return bool(space.get("moe_shared_expert_intermediate_size"))


def _layer_pattern(job: PlannedJob) -> object:
    """Which layers are mixtures. Where a mixture is alone in its layer, the pattern of all layers says it."""
    moe = job.shape.moe
    some = moe is not None and len(set(moe.layer_pattern)) > 1 and job.shape.mamba is None
    return f"[{','.join(map(str, moe.layer_pattern))}]" if moe is not None and some else None


def _read_layers(space: Space) -> object:
    pattern = space.get("moe_layer_freq")
    return list(pattern) if pattern is not None and not all(pattern) and not space.get(PATTERN) else None


def _biased_in_one_kernel(job: PlannedJob) -> bool:
    return job.shape.linear_bias and _grouped(job)


SHARED_FLAGS: tuple[Flag, ...] = (
    flag("--moe-shared-expert-intermediate-size", "model.moe.shared_expert_ffn_hidden_size", when=_is_shared),
    flag(
        "--moe-shared-expert-gate",
        "model.moe.shared_expert_gate",
        when=_is_shared,
        read=lambda space: True if _shared(space) and space.get("moe_shared_expert_gate") else None,
    ),
    flag("--moe-shared-expert-overlap", "layout.overlap_shared_expert", when=_is_shared, subject="dispatch of tokens"),
    flag("--moe-layer-freq", "model.moe.layer_pattern", write=_layer_pattern, read=_read_layers),
    flag(
        "--moe-expert-capacity-factor",
        "model.moe.capacity_factor",
        read=lambda space: space.get("moe_expert_capacity_factor") or None,
    ),
    flag("--moe-latent-size", "model.moe.latent_size"),
    chosen(
        "--use-fused-weighted-squared-relu",
        keys="model.activation",
        why="one kernel squares and weighs what experts put out",
        when=lambda job: job.shape.activation == SQUARED,
        added=True,
        subject="fusions and kernels",
    ),
    chosen(
        "--no-bias-dropout-fusion",
        keys="model.linear_bias",
        why="experts in one kernel add their biases themselves",
        when=_biased_in_one_kernel,
        subject="fusions and kernels",
    ),
)

MIXTURE_FLAGS: tuple[Flag, ...] = (
    *within(
        _has_experts,
        flag("--num-experts", "model.moe.num_experts", (("model.num_moe_experts", PARSED),), decides="model.moe"),
        flag("--moe-router-topk", "model.moe.topk", read=lambda space: space.get("moe_router_topk") or USUAL_TOPK),
        flag("--moe-ffn-hidden-size", "model.moe.ffn_hidden_size"),
        *DISPATCH_FLAGS,
        *FIXED_ROW_FLAGS,
        *ROUTER_FLAGS,
        *SHARED_FLAGS,
        when=_is_mixture,
    ),
    alias("--moe-enable-deepep", "layout.flex_backend", subject="library that dispatches tokens"),
)
