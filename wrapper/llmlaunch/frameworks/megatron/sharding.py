"""Megatron-FSDP (core 0.19): which recipes ask for it, and how its stages are asked for."""

from __future__ import annotations

from llmlaunch.frameworks.base import StateTechniques
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
