"""`backend.ds_config`: what a person writes is rendered as it is and priced; what the recipe decides is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from llmlaunch.errors import UserError
from llmlaunch.frameworks.deepspeed.backend import DeepSpeed
from llmlaunch.frameworks.deepspeed.own_settings import bucket_elements, live_parameters
from llmlaunch.frameworks.deepspeed.settings import PLANNED
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe
from support.recipes import recipe_of

LAYOUT = Layout(data=8, zero_stage=3)
SCRIPT = "script: train.py, script_kind: hugging-face"


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    job = ("model=llama3.2-1b", "cluster=h100-80gb-x8", "nodes=1", "training.global_batch_size=128")
    return recipe_of("llama2-7b-deepspeed", *job, f"backend={{name: deepspeed, {SCRIPT}}}")


def with_settings(recipe: Recipe, settings: dict[str, Any]) -> Recipe:
    return replace(recipe, backend=replace(recipe.backend, ds_config=settings))


def rendered(recipe: Recipe) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(DeepSpeed().render(recipe, LAYOUT).files["ds_config.json"])
    return settings


def test_settings_are_rendered_over_and_beside_those_of_llmlaunch(recipe: Recipe) -> None:
    own = {"zero_optimization": {"overlap_comm": False, "round_robin_gradients": True}, "wall_clock_breakdown": True}
    before, after = rendered(recipe), rendered(with_settings(recipe, own))
    section = {**before["zero_optimization"], **own["zero_optimization"]}  # type: ignore[dict-item]
    assert after == {**before, "zero_optimization": section, "wall_clock_breakdown": True}


def test_sizes_of_buckets_are_priced(recipe: Recipe) -> None:
    own = {"zero_optimization": {"reduce_bucket_size": 500_000_000, "stage3_max_live_parameters": 1000}}
    asked = with_settings(recipe, own)
    assert (bucket_elements(asked), live_parameters(asked)) == (500_000_000, 1000)
    more = DeepSpeed().facts(asked).zero.bucket_bytes - DeepSpeed().facts(recipe).zero.bucket_bytes
    assert more == 3 * 2 * (500_000_000 - bucket_elements(recipe))


def test_auto_is_what_the_trainer_fills_in(recipe: Recipe) -> None:
    asked = with_settings(recipe, {"zero_optimization": {"reduce_bucket_size": "auto"}})
    assert bucket_elements(asked) == recipe.model.hidden_size**2
    assert rendered(asked)["zero_optimization"]["reduce_bucket_size"] == "auto"
    own = replace(asked, backend=replace(asked.backend, script_kind="own"))
    with pytest.raises(UserError, match="auto"):
        rendered(own)


@pytest.mark.parametrize("key", sorted(PLANNED))
def test_what_the_recipe_decides_is_refused_with_its_key(recipe: Recipe, key: str) -> None:
    settings: Any = 1
    for part in reversed(key.split(".")):
        settings = {part: settings}
    with pytest.raises(UserError) as caught:
        DeepSpeed().rules(with_settings(recipe, settings))
    assert PLANNED[key] in str(caught.value)


@pytest.mark.parametrize("value", ["many", True, -1, 1.5])
def test_a_bucket_is_a_whole_number(recipe: Recipe, value: object) -> None:
    with pytest.raises(UserError, match="whole number"):
        bucket_elements(with_settings(recipe, {"zero_optimization": {"reduce_bucket_size": value}}))
