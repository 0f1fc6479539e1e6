"""The number formats of a run, as its measurement record names them."""

from __future__ import annotations

from dataclasses import asdict

from llmlaunch.memory.facts import MemoryFacts
from llmlaunch.recipe.types import Recipe

__all__ = ["number_record"]

Section = dict[str, object]


def number_record(recipe: Recipe, facts: MemoryFacts) -> dict[str, Section]:
    """What a record's "optimizer" and "precision" sections say beyond the recipe's `precision`."""
    precision, numbers = recipe.workload.precision, recipe.training.numbers
    optimizer: Section = {"gradient_dtype": "fp32" if facts.gradient_bytes == 4 else precision}
    if numbers.optimizer is not None:
        optimizer["state_dtype"] = f"{numbers.optimizer.first_moment}, {numbers.optimizer.second_moment}"
        optimizer["state_bytes_per_parameter"] = facts.optimizer_bytes
        optimizer["formats"] = asdict(numbers.optimizer)
    if numbers.narrow is None:
        return {"optimizer": optimizer}
    narrow: Section = {"fp8_recipe": numbers.narrow, "fp8_param_gather": numbers.narrow_parameters}
    return {"optimizer": optimizer, "precision": narrow}
