"""Number formats in Megatron-LM's words (core 0.19): of the computation, its linear layers and the optimizer."""

from __future__ import annotations

from llmlaunch.backends.argument import Argument, argument
from llmlaunch.layout import Layout
from llmlaunch.number_formats import NumberFormats
from llmlaunch.recipe.types import Recipe

__all__ = ["number_arguments"]

# Gradients need the range of e5m2 where one scale is for a whole tensor; with a scale for each block e4m3 has enough of
# it (transformer_engine/common/recipe/__init__.py, the recipes' defaults, 2.20).
FORMATS = {"delayed": "hybrid", "tensorwise": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}
REMEMBERED_STEPS = 1024


def number_arguments(recipe: Recipe, layout: Layout) -> tuple[Argument, ...]:
    """The format of the computation, the narrower one of its linear layers, and those the optimizer keeps."""
    precision = recipe.workload.precision
    made = [argument(f"--{precision}", of="training.precision")] if precision != "fp32" else []
    return (*made, *_narrow(recipe.training.numbers, layout), *_optimizer(recipe))


def _narrow(numbers: NumberFormats, layout: Layout) -> list[Argument]:
    name = numbers.narrow
    if name is None:
        return []
    if name == "nvfp4":
        return [argument("--fp4-format", "e2m1", of="training.fp4"), argument("--fp4-recipe", name, of="training.fp4")]
    key = "training.fp8"
    made = [argument("--fp8-format", FORMATS[name], of=key), argument("--fp8-recipe", name, of=key)]
    if name == "delayed":
        of_many = "a scale from the largest value of many steps; its default is the last step alone"
        made += [argument("--fp8-amax-history-len", REMEMBERED_STEPS, of=key, why=of_many)]
        made += [argument("--fp8-amax-compute-algo", "max", of=key, why=of_many)]
    if numbers.narrow_parameters:
        made += [argument("--fp8-param-gather", of="training.fp8_parameters")]
        if name == "mxfp8" and layout.zero_stage == 1:  # Megatron-FSDP switches it off
            shared = "gathered in bf16 into the gradients' buffer; one of their own would take 2 bytes a parameter more"
            made += [argument("--reuse-grad-buf-for-mxfp8-param-ag", of="training.fp8_parameters", why=shared)]
    return made


def _optimizer(recipe: Recipe) -> list[Argument]:
    """Megatron's main gradients are its gradient buffer: their format is that of `training.gradient_dtype`."""
    kept = recipe.training.numbers.optimizer
    if kept is None:
        return []
    key = "training.optimizer"
    made = [
        argument("--use-precision-aware-optimizer", of=key),
        argument("--main-params-dtype", kept.main_parameters, of=f"{key}.main_parameters"),
        argument("--exp-avg-dtype", kept.first_moment, of=f"{key}.first_moment"),
        argument("--exp-avg-sq-dtype", kept.second_moment, of=f"{key}.second_moment"),
    ]
    if recipe.training.gradient_dtype == "bf16":
        made += [argument("--main-grads-dtype", "bf16", of="training.gradient_dtype")]
    return made
