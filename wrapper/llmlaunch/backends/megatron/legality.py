"""All that Megatron-LM accepts and refuses, as one list for planner, check, docs and the oracle's tests."""

from __future__ import annotations

from llmlaunch.backends.megatron import (
    model_rules,
    number_formats,
    overlap,
    rules,
    sharding,
    techniques,
    training_arguments,
    versions,
)
from llmlaunch.layout import Rule
from llmlaunch.recipe.types import Recipe
from llmlaunch.workload import NO_NUMBER_FORMATS

__all__ = ["ALL_REQUIREMENTS", "ALL_RULES", "rules_for"]

ALL_REQUIREMENTS = (
    *model_rules.MODEL_REQUIREMENTS,
    *rules.MIXTURE_REQUIREMENTS,
    *techniques.REQUIREMENTS,
    *sharding.SHARDING_REQUIREMENTS,
    *overlap.OVERLAP_REQUIREMENTS,
    *training_arguments.CHECKPOINT_REQUIREMENTS,
    *versions.VERSION_REQUIREMENTS,
    *number_formats.NUMBER_REQUIREMENTS,
)
ALL_RULES = (
    *rules.RULES,
    *model_rules.MODEL_RULES,
    *techniques.TECHNIQUE_RULES,
    *sharding.SHARDING_RULES,
    *overlap.OVERLAP_RULES,
    *number_formats.NUMBER_RULES,
)


def rules_for(recipe: Recipe) -> tuple[Rule, ...]:
    """Those that can refuse a layout of this recipe."""
    usual = recipe.training.numbers == NO_NUMBER_FORMATS
    idle = number_formats.NUMBER_RULES if usual else ()
    return tuple(rule for rule in (*ALL_RULES, *versions.rules_of_version(recipe)) if rule not in idle)
