"""A fixed number of rows for the tokens of a device's experts, and pages for what they save: what Megatron core takes
beside them, as data, and the arguments that ask for them.

The host then asks the device for no size, so that a graph can hold the whole iteration. Transformer Engine's kernel for
all experts of a device reads on the device how many rows have tokens. A step with more tokens than rows or pages is run
again without both (megatron/core/transformer/moe/paged_stash.py PagedStashRunner, core 0.19).
"""

from __future__ import annotations

import numpy as np

from llmlaunch.columns import BoolColumn
from llmlaunch.frameworks.base import Requirement, implies, of_techniques
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, Rule, Situation
from llmlaunch.recipe.types import Recipe

KEY, STASH = "layout.expert_rank_capacity_factor", "layout.paged_stash"
CONFIG = "megatron/core/transformer/transformer_config.py, core 0.19"
EXPERTS = "megatron/core/transformer/moe/experts.py TEGroupedMLP._is_fused_impl_supported, core 0.19"
KERNEL = "transformer_engine/pytorch/ops/fused/grouped_mlp.py fuse_grouped_mlp_ops, 2.20"
PAGES = "megatron/core/transformer/moe/paged_stash.py, core 0.19"
INTERLEAVED = 32  # columns of gate and up in turn, as the kernel wants them
MULTIPLE = 64  # of which the kernel takes widths
INSIDE_EXPERTS = frozenset({"moe_act", "expert_fc1"})


def _fixed(recipe: Recipe) -> bool:
    return recipe.techniques.expert_rank_capacity_factor is not None


def _other_experts(recipe: Recipe) -> bool:
    """Core 0.19 takes some of these, too; what they save is not priced."""
    shape, moe = recipe.model, recipe.model.moe
    gated = shape.gated_mlp and shape.activation == "silu"
    return moe is not None and (
        not gated or shape.linear_bias or moe.grouped_gemm is False or moe.router.weighted_inputs
    )


def _odd_widths(recipe: Recipe) -> bool:
    moe = recipe.model.moe
    return moe is not None and bool(recipe.model.expert_width % MULTIPLE or moe.ffn_hidden_size % MULTIPLE)


def _holds_no_share(recipe: Recipe) -> bool:
    stash = recipe.techniques.paged_stash
    return stash is not None and stash.device_factor + stash.host_factor < 1.0


FIXED_ROW_REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "fixed-rows-by-hybridep",
        KEY,
        "needs token_dispatcher: flex with flex_backend: hybridep, which takes a number of rows; write those too, or "
        "remove it",
        CONFIG,
        lambda r: _fixed(r) and (r.techniques.token_dispatcher, r.techniques.flex_backend) != ("flex", "hybridep"),
    ),
    Requirement(
        "fixed-rows-of-fused-experts",
        KEY,
        "needs experts in one kernel, gated by SiLU, without biases, weighed after they have run; remove it",
        EXPERTS,
        lambda r: _fixed(r) and _other_experts(r),
    ),
    Requirement(
        "fixed-rows-in-mxfp8",
        KEY,
        "needs training.fp8: mxfp8: experts are one kernel in no other format that is priced; write that too, or "
        "remove it",
        KERNEL,
        lambda r: _fixed(r) and r.training.numbers.narrow != "mxfp8",
    ),
    Requirement(
        "fixed-rows-widths",
        KEY,
        f"needs experts whose widths are multiples of {MULTIPLE}; remove it",
        KERNEL,
        lambda r: _fixed(r) and _odd_widths(r),
    ),
    Requirement(
        "fixed-rows-alone",
        KEY,
        "says how many tokens a device's experts take together, and model.moe.capacity_factor how many each takes; "
        "remove one of the two",
        "megatron/core/transformer/moe/token_dispatcher.py _HybridEPManager.setup_metadata, core 0.19",
        lambda r: _fixed(r) and r.model.moe is not None and r.model.moe.capacity_factor is not None,
    ),
    Requirement(
        "fixed-rows-begin-anew",
        KEY,
        f"has {INTERLEAVED} columns of gate and up lie in turn, and pretrain_gpt.py reads weights of other jobs as "
        "they are; remove training.start_from, or take backend: megatron-bridge",
        "megatron/core/transformer/moe/experts.py TEGroupedMLP, core 0.19",
        lambda r: _fixed(r) and r.training.start_from is not None,
    ),
    Requirement(
        "stash-of-fixed-rows",
        STASH,
        "needs expert_rank_capacity_factor: only rows that no token fills make pages worth while; write that too, or "
        "remove it",
        CONFIG,
        lambda r: r.techniques.paged_stash is not None and not _fixed(r),
    ),
    Requirement(
        "stash-holds-equal-shares",
        STASH,
        "cannot take even equally shared tokens, so that every step would be run twice; let device_factor and "
        "host_factor add up to 1 at least",
        PAGES,
        _holds_no_share,
    ),
)


def _kept_experts(s: Situation) -> BoolColumn:
    selective = implies("moe" in s.techniques.recompute_modules, np.not_equal(s.layouts.recompute, RECOMPUTE_SELECTIVE))
    return selective & np.not_equal(s.layouts.recompute, RECOMPUTE_FULL)


def _offloads_experts(s: Situation) -> bool:
    return bool(INSIDE_EXPERTS & set(s.techniques.offload_modules))


def _none(s: Situation) -> BoolColumn:
    return np.zeros(len(s.layouts), dtype=np.bool_)


FIXED_ROW_RULES: tuple[Rule, ...] = of_techniques(
    Rule(
        "fixed-rows-whole-experts",
        "expert_rank_capacity_factor needs --expert-tensor-parallel-size 1",
        EXPERTS,
        lambda s: implies(s.techniques.expert_rank_capacity_factor is not None, np.equal(s.layouts.expert_tensor, 1)),
    ),
    Rule(
        "fixed-rows-keep-activation",
        "expert_rank_capacity_factor cannot recompute moe_act: it is a part of the experts' one kernel, and Megatron "
        "would silently keep it",
        "megatron/core/transformer/moe/experts.py TEGroupedMLP._fused_forward, core 0.19",
        lambda s: implies(
            s.techniques.expert_rank_capacity_factor is not None and "moe_act" in s.techniques.recompute_modules,
            np.not_equal(s.layouts.recompute, RECOMPUTE_SELECTIVE),
        ),
    ),
    Rule(
        "fixed-rows-on-device",
        "expert_rank_capacity_factor cannot offload moe_act or expert_fc1, parts of the experts' one kernel",
        EXPERTS,
        lambda s: implies(
            s.techniques.expert_rank_capacity_factor is not None
            and s.techniques.paged_stash is None
            and _offloads_experts(s),
            _none(s),
        ),
    ),
    Rule(
        "stash-in-place-of-offload",
        "paged_stash holds what offload_modules: moe_act and expert_fc1 would move; remove one of the two",
        CONFIG,
        lambda s: implies(s.techniques.paged_stash is not None and _offloads_experts(s), _none(s)),
    ),
    Rule(
        "stash-no-offloaded-layers",
        "paged_stash excludes offload_layers",
        CONFIG,
        lambda s: implies(s.techniques.paged_stash is not None, np.equal(s.layouts.offload_layers, 0)),
    ),
    Rule(
        "stash-of-kept-experts",
        "paged_stash needs experts that are not recomputed: with recompute: full, or moe among recompute_modules, "
        "nothing of theirs waits",
        PAGES,
        lambda s: implies(s.techniques.paged_stash is not None, _kept_experts(s)),
    ),
)
