"""Megatron-FSDP (core 0.19): which recipes ask for it, and how its stages are requested."""

from __future__ import annotations

from llmlaunch.frameworks.base import StateTechniques
from llmlaunch.models.shape import ModelShape
from llmlaunch.recipe.types import Recipe

STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}
FIRST_STAGE = min(STRATEGIES)
KEY = "layout.zero_stage"


def pinned_stages(recipe: Recipe) -> tuple[int, ...]:
    """Return the ZeRO stages that a recipe allows; empty if it leaves the stage to the search."""
    pin = recipe.pins.get("zero_stage", ())
    return tuple(int(stage) for stage in (pin if isinstance(pin, tuple) else (pin,)))


def asks_for_sharding(recipe: Recipe) -> bool:
    """Return whether the recipe asks for Megatron-FSDP. It is another implementation, so it is used only if the recipe
    pins its stages."""
    return any(stage >= FIRST_STAGE for stage in pinned_stages(recipe))


def sharding_techniques(gradient_formats: tuple[str | None, ...]) -> tuple[StateTechniques, ...]:
    """Return the state techniques that a search may choose: the stages, each with every gradient format."""
    return tuple(
        StateTechniques(zero_stage=stage, gradient_dtype=dtype) for dtype in gradient_formats for stage in STRATEGIES
    )


def gradient_format(recipe: Recipe) -> str:
    """Return the format in which gradients accumulate."""
    precision = recipe.workload.precision
    return recipe.training.gradient_dtype or ("fp32" if precision == "bf16" else precision)


def made_in_shards(shape: ModelShape) -> bool:
    """Return whether the model can be created in shards on the meta device. A learned position embedding cannot: it is
    a plain torch.nn.Embedding, which would initialise itself with a deviation of 1 instead of --init-method-std
    (reset_parameters of torch/nn/modules/sparse.py; megatron_fsdp/param_and_grad_buffer.py, core 0.19)."""
    return shape.position_embedding != "learned_absolute"
