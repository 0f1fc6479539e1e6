"""Number formats on DeepSpeed beside the precision: what gradients add up in."""

from __future__ import annotations

import numpy as np

from llmlaunch.frameworks.base import Requirement, implies
from llmlaunch.layout import Rule
from llmlaunch.recipe.types import Recipe

__all__ = [
    "FORMAT_REQUIREMENTS",
    "FORMAT_RULES",
    "adds_up_in_fp32",
    "number_rules",
]

ENGINE = "deepspeed/runtime/engine.py _do_optimizer_sanity_check, 0.19.8"
FACTS = "llmlaunch/frameworks/deepspeed/facts.py ENGINES"
GRADIENTS = "training.gradient_dtype"


def adds_up_in_fp32(recipe: Recipe) -> bool:
    """Return whether gradients of bf16 add up in fp32."""
    return recipe.workload.precision == "bf16" and recipe.training.gradient_dtype == "fp32"


FORMAT_REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "gradients-as-computed",
        GRADIENTS,
        "gradients accumulate in the precision of the computation, or in fp32 with precision bf16",
        "deepspeed/runtime/engine.py get_data_types, 0.19.8",
        lambda r: r.training.gradient_dtype not in (None, r.workload.precision) and not adds_up_in_fp32(r),
    ),
)

_WIDE_GRADIENTS: tuple[Rule, ...] = (
    Rule(
        "gradients-fp32-zero",
        "gradient_dtype: fp32 needs zero_stage 1, 2 or 3",
        ENGINE,
        lambda s: np.greater(s.layouts.zero_stage, 0),
        of_techniques=True,
    ),
    Rule(
        "gradients-fp32-here",
        "gradient_dtype: fp32 is not counted for optimizer states on the host: leave one of the two out",
        FACTS,
        lambda s: implies(s.techniques.offload_optimizer > 0, np.zeros(len(s.layouts), dtype=np.bool_)),
        of_techniques=True,
    ),
)
FORMAT_RULES = _WIDE_GRADIENTS


def number_rules(recipe: Recipe) -> tuple[Rule, ...]:
    """Return the rules of the formats that the recipe names."""
    return _WIDE_GRADIENTS if adds_up_in_fp32(recipe) else ()
