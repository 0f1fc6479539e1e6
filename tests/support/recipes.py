"""Recipes of the gallery for tests."""

from __future__ import annotations

from llmlaunch.assets import asset
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe


def recipe_of(name: str, *overrides: str) -> Recipe:
    """Return the gallery's recipe of that name with `KEY=VALUE` overrides."""
    return load_recipe(asset("recipes", f"{name}.yaml"), overrides)
