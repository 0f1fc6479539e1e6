"""The table of Megatron-Bridge's recipes is that of the Megatron-Bridge that is installed."""

from __future__ import annotations

from llmlaunch.frameworks.bridge.recipe_fields import RECIPES
from support.bridge_recipes import text


def test_the_table_of_recipes_is_up_to_date() -> None:
    assert RECIPES.read_text("utf-8") == text()
