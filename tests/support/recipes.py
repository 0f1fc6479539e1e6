"""Recipes for tests: those of the gallery, and a small one to change lines of."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from llmlaunch.assets import asset
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe

SMALL = Path(__file__).resolve().parents[1] / "data" / "small.yaml"
ON_FOUR_NODES = {
    "schema": "1",
    "name": "mine",
    "model": "llama3-8b",
    "backend": "megatron-lm",
    "cluster": "h100-80gb-x8",
    "nodes": "4",
    "training": "{sequence_length: 8192, global_batch_size: 512, steps: 10}",
    "data": "{mock: true}",
}


def recipe_of(name: str, *overrides: str) -> Recipe:
    """Return the gallery's recipe of that name with `KEY=VALUE` overrides."""
    return load_recipe(asset("recipes", f"{name}.yaml"), overrides)


@cache
def gallery_of(backend: str) -> tuple[str, ...]:
    """Return the names of the gallery's recipes of a backend."""
    names = sorted(path.stem for path in asset("recipes").glob("*.yaml"))
    return tuple(name for name in names if recipe_of(name).backend.name == backend)


def small(*overrides: str) -> Recipe:
    """Return tests/data/small.yaml, 8B on four nodes, with `KEY=VALUE` overrides."""
    return load_recipe(SMALL, overrides)


def recipe_text(**values: str) -> str:
    """Return the text of an 8B recipe, one line a key, with `values` in place of its own or below them."""
    return "".join(f"{key}: {value}\n" for key, value in (ON_FOUR_NODES | values).items())
