"""Models whose layers have one part each, Mamba-2 mixers among them, on Megatron-LM (core 0.19): arguments, and what
they exclude.

pretrain_hybrid.py builds them (megatron/core/models/hybrid). All layers and the stages they lie in are one argument:
letters in their order, "|" between stages and "/" before each module of multi-token prediction.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from llmlaunch.columns import BoolColumn
from llmlaunch.errors import UserError
from llmlaunch.frameworks.base import Requirement, implies
from llmlaunch.frameworks.megatron.flags.row import PATTERN
from llmlaunch.layout import Layout, Rule, Situation
from llmlaunch.models.sections import BUILT_BY_CORE, CONV_KERNEL, PARTS, SCAN_CHUNK, Mamba

STACK = "megatron/core/models/hybrid/hybrid_block.py HybridStack, core 0.19"
SPECIFICATION = ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec")


def hybrid_pattern(mamba: Mamba, layout: Layout, mtp_layers: int) -> str:
    """The layers with all stages written out, even ones too: core 0.19 warns of a pattern that leaves them to it
    (hybrid_layer_allocation.py select_pipeline_segment)."""
    stages = layout.pipeline * layout.virtual_pipeline
    split = layout.layers_by_stage or (len(mamba.pattern) // stages,) * stages
    ends = accumulate(split, initial=0)
    written = "|".join(mamba.pattern[start:end] for start, end in pairwise(ends))
    return written + f"/{mamba.mtp_pattern}" * mtp_layers


def _as_built(mamba: Mamba) -> bool:
    return PARTS.keys() >= {*mamba.pattern} and all(
        getattr(mamba, name) == value for name, value in BUILT_BY_CORE.items()
    )


def _heads_divide(s: Situation) -> BoolColumn:
    mamba = s.shape.mamba
    return implies(
        mamba is not None, np.equal((mamba.num_heads if mamba else 0) % (s.layouts.tensor * s.layouts.context), 0)
    )


def _groups_divide(s: Situation) -> BoolColumn:
    """Over more context ranks than there are groups, each group is there several times."""
    groups, context = s.shape.mamba.groups if s.shape.mamba else 0, s.layouts.context
    each = np.maximum(groups // s.layouts.tensor, 1)
    shared = np.equal(each % context, 0) | (np.less(each, context) & np.equal(context % each, 0))
    return implies(s.shape.mamba is not None, np.equal(groups % s.layouts.tensor, 0) & shared)


HYBRID_RULES: tuple[Rule, ...] = (
    Rule(
        "mamba-heads",
        "tensor x context parallel size must divide --mamba-num-heads",
        "megatron/core/ssm/mamba_context_parallel.py, core 0.19",
        _heads_divide,
    ),
    Rule(
        "mamba-groups",
        "--tensor-model-parallel-size must divide --mamba-num-groups, and what that leaves must be a multiple or a "
        "divisor of --context-parallel-size",
        "megatron/core/ssm/mamba_context_parallel.py, core 0.19",
        _groups_divide,
    ),
    Rule(
        "hybrid-without-layer-offload",
        "offload_layers moves nothing of layers of one part each; write 0",
        STACK,
        lambda s: implies(s.shape.mamba is not None, np.equal(s.layouts.offload_layers, 0)),
    ),
)

HYBRID_REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "hybrid-positions",
        "model.position_embedding",
        "is rope, learned_absolute or none beside Mamba-2 mixers, and is not scaled",
        "megatron/core/models/hybrid/hybrid_model.py HybridModel, core 0.19",
        lambda r: (
            r.model.mamba is not None and (r.model.position_embedding == "alibi" or r.model.rope_scaling is not None)
        ),
    ),
    Requirement(
        "mixers-as-built",
        "model.mamba",
        f"layers are one part each here ({', '.join(PARTS)}), and mixers have a convolution of {CONV_KERNEL} tokens "
        f"with a bias, chunks of {SCAN_CHUNK} tokens and a gated norm",
        "megatron/core/ssm/mamba_mixer.py MambaMixer, core/models/hybrid/hybrid_layer_allocation.py, core 0.19",
        lambda r: r.model.mamba is not None and not _as_built(r.model.mamba),
    ),
    Requirement(
        "hybrid-begins-otherwise",
        "model.mamba.pattern",
        "begins with an MLP (-), which Megatron's parser takes for another argument; begin with another layer",
        "megatron/training/arguments.py parse_args, core 0.19",
        lambda r: r.model.mamba is not None and r.model.mamba.pattern.startswith("-"),
    ),
    Requirement(
        "hybrid-attention-norms",
        "model.qk_layernorm",
        "the attention of layers of one part each has no norms of queries and keys; remove it",
        "megatron/core/models/hybrid/hybrid_layer_specs.py hybrid_stack_spec, core 0.19",
        lambda r: r.model.mamba is not None and (r.model.qk_layernorm or r.model.qk_l2_norm),
    ),
    Requirement(
        "hybrid-exchange-in-turn",
        "layout.overlap_expert_communication",
        "has no schedule for layers of one part each; remove it",
        "megatron/core/models/gpt/gpt_model.py GPTModel.build_schedule_plan, core 0.19",
        lambda r: r.model.mamba is not None and r.techniques.overlaps_experts,
    ),
    Requirement(
        "latent-experts-in-turn",
        "layout.overlap_shared_expert",
        "a shared expert cannot run beside experts that work on latents (model.moe.latent_size); remove it",
        "megatron/core/transformer/moe/moe_layer.py MoELayer.preprocess, core 0.19",
        lambda r: (
            r.techniques.overlap_shared_expert and r.model.moe is not None and r.model.moe.latent_size is not None
        ),
    ),
)


STAGE, MODULE = "|", "/"
EARLIER_SPECIFICATION = ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]
EXPANSION = 2  # of MambaMixer, where nothing says how many heads there are


def one_pattern(space: dict[str, Any]) -> tuple[str, ...]:
    """Put one spelling of the pattern into a namespace, without the stages, and return the layers of each stage; none
    where the model has no such pattern, and one stage where the pattern names none."""
    earlier, module = space.pop("hybrid_override_pattern", None), space.pop("mtp_hybrid_override_pattern", None)
    whole = space.get(PATTERN) or earlier
    if not whole:
        return ()
    space.pop("is_hybrid_model", None)
    main, *modules = str(whole).split(MODULE)
    if module and not modules:
        modules = [str(module)] * (space.get("mtp_num_layers") or 0)
    stages = tuple(main.split(STAGE))
    layers = "".join(stages)
    space |= {PATTERN: MODULE.join((layers, *modules)), "num_layers": len(layers)}
    if modules:
        space["mtp_num_layers"] = len(modules)
    if space.get("spec") == EARLIER_SPECIFICATION:
        space["spec"] = list(SPECIFICATION)
    if space.get("mamba_num_heads") is None and space.get("hidden_size") and space.get("mamba_head_dim"):
        space["mamba_num_heads"] = EXPANSION * space["hidden_size"] // space["mamba_head_dim"]
    return stages


def refuse_other_parts(space: dict[str, Any], place: str) -> None:
    """Raise UserError where a letter stands for a part that no recipe describes, or modules differ."""
    layers, *modules = str(space[PATTERN]).split(MODULE)
    unknown = sorted(set(layers + "".join(modules)) - set(PARTS))
    if unknown or not layers or len(set(modules)) > 1:
        known = ", ".join(PARTS)
        why = "modules of multi-token prediction that differ" if not unknown and layers else f"letters beside {known}"
        raise UserError(f"{place}: --hybrid-layer-pattern: has {why}; recipes describe layers of {known} alone")
