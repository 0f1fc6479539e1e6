"""Megatron-FSDP (core 0.19): which recipes ask for it, its rules and arguments, and what it keeps in memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llmlaunch.columns import BoolColumn
from llmlaunch.facts import MemoryFacts
from llmlaunch.frameworks.base import Requirement, StateTechniques, of_techniques
from llmlaunch.frameworks.megatron.facts import MegatronOptions, megatron_fsdp_facts
from llmlaunch.layout import Rule, Situation
from llmlaunch.models.shape import ModelShape
from llmlaunch.recipe.types import Recipe

STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}
FIRST_STAGE = min(STRATEGIES)
KEY = "layout.zero_stage"


def pinned_stages(recipe: Recipe) -> tuple[int, ...]:
    """The ZeRO stages a recipe allows; empty where it leaves the stage free."""
    pin = recipe.pins.get("zero_stage", ())
    return tuple(int(stage) for stage in (pin if isinstance(pin, tuple) else (pin,)))


def asks_for_sharding(recipe: Recipe) -> bool:
    """Megatron-FSDP is another implementation, so it is taken only where the recipe pins its stages."""
    return any(stage >= FIRST_STAGE for stage in pinned_stages(recipe))


def sharding_techniques(gradient_formats: tuple[str | None, ...]) -> tuple[StateTechniques, ...]:
    """What a search may choose of what is held: the stages, each with every format of gradients."""
    return tuple(
        StateTechniques(zero_stage=stage, gradient_dtype=dtype) for dtype in gradient_formats for stage in STRATEGIES
    )


def gradient_format(recipe: Recipe) -> str:
    """What gradients accumulate in."""
    precision = recipe.workload.precision
    return recipe.training.gradient_dtype or ("fp32" if precision == "bf16" else precision)


def made_in_shards(shape: ModelShape) -> bool:
    """A learned position embedding is a plain torch.nn.Embedding, which on the meta device would be initialised by
    itself, with a deviation of 1 in the place of --init-method-std (reset_parameters of torch/nn/modules/sparse.py;
    megatron_fsdp/param_and_grad_buffer.py, core 0.19)."""
    return shape.position_embedding != "learned_absolute"


def sharding_facts(recipe: Recipe, options: MegatronOptions) -> MemoryFacts:
    """What these words keep in memory."""
    facts = megatron_fsdp_facts(replace(options, gradient_accumulation_fusion=False))
    return replace(facts, states=replace(facts.states, placed_whole=not made_in_shards(recipe.model)))


CHECKPOINTS = "megatron/training/checkpointing.py"


SHARDING_REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "sharding-by-itself",
        "layout.zero_stage",
        "2 and 3 are Megatron-FSDP, another implementation than 0 and 1; write stages of one of the two",
        "megatron/training/training.py get_model, core 0.19",
        lambda r: asks_for_sharding(r) and min(pinned_stages(r)) < FIRST_STAGE,
    ),
    Requirement(
        "sharded-starts-anew",
        "training.start_from",
        "zero_stage 2 and 3 cannot start from weights alone: the optimizer's copies of them are never made; remove it, "
        "or take zero_stage 1",
        "megatron/core/optimizer/distrib_optimizer.py _copy_model_params_to_main_params, core 0.19",
        lambda r: asks_for_sharding(r) and r.training.start_from is not None,
    ),
    Requirement(
        "sharded-checkpoints-of-halves",
        "training.precision",
        "fp32 cannot be saved with zero_stage 2 or 3 and a gated MLP: its halves are looked for below the wrapper that "
        "bf16 and fp16 have; write bf16, or remove training.checkpoint_path",
        "megatron/core/transformer/fsdp_dtensor_checkpoint.py handle_swiglu_in_state_dict, core 0.19",
        lambda r: (
            asks_for_sharding(r)
            and r.workload.precision == "fp32"
            and r.model.gated_mlp
            and r.training.checkpoint_path is not None
        ),
    ),
)


def sharded(s: Situation) -> BoolColumn:
    column: BoolColumn = np.greater_equal(s.layouts.zero_stage, FIRST_STAGE)
    return column


SHARDING_RULES: tuple[Rule, ...] = of_techniques(
    Rule(
        "sharded-one-stage",
        "zero_stage 2 and 3 need --pipeline-model-parallel-size 1: a checkpoint names the layers of every stage from 0 "
        "on, so those of one stage would stand for all",
        f"{CHECKPOINTS} generate_state_dict, preprocess_fsdp_dtensor_state_dict, core 0.19",
        lambda s: ~sharded(s) | np.equal(s.layouts.pipeline, 1),
    ),
    Rule(
        "sharded-optimizer-stays",
        "zero_stage 2 and 3 keep the optimizer on the device: the one that is offloaded knows no sharded tensors",
        "megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py, core 0.19",
        lambda s: ~sharded(s) | np.bool_(s.techniques.offload_optimizer == 0.0),
    ),
)
