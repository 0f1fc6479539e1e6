"""A plan says under which techniques its figures hold."""

from __future__ import annotations

from llmlaunch.assets import asset
from llmlaunch.backends.registry import backend_for
from llmlaunch.planner.planning import make_plan
from llmlaunch.recipe.load import load_recipe
from llmlaunch.report.plan_text import check_text


def said(*overrides: str) -> str:
    recipe = load_recipe(asset("recipes", "llama2-7b-deepspeed.yaml"), overrides)
    return check_text(recipe, make_plan(recipe, backend_for(recipe)))


def test_techniques_stand_in_the_headline() -> None:
    text = said("layout={zero_stage: 3, offload_parameters: true, mlp_chunks: 4}", "training.adapters={rank: 8}")
    assert "  with offload_parameters on, mlp_chunks 4, adapters rank 8 frozen_down off" in text
    assert "\n  with " not in said()
