"""The gallery's DeepSpeed recipes train for real, shrunken, from the words we render; so do the families none is of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_family_bytes import PRESETS, small
from trainer_runner import Ran, as_case, run

from llmlaunch.assets import asset
from llmlaunch.backends.deepspeed.backend import DeepSpeed
from llmlaunch.layout import RECOMPUTE_FULL, Layout
from llmlaunch.models.presets import load_preset
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe
from llmlaunch.workload import Workload

pytestmark = pytest.mark.frameworks

STEPS = 6
TINY = (
    *("cluster=cpu-x2", "nodes=1", "training.precision=fp32"),
    *("training.sequence_length=64", "training.global_batch_size=8", "training.learning_rate=0.01"),
    *(f"training.steps={STEPS}", "data={python_source: true}"),
)
BY_DATA = Layout(data=2, micro_batch_size=2, zero_stage=3, recompute=RECOMPUTE_FULL)
BY_SEQUENCE = Layout(context=2, micro_batch_size=2, zero_stage=3)
LAYOUTS = {"llama3.1-8b-ulysses": BY_SEQUENCE}
SIZES = {"llama3.1-8b-ulysses": ("layout.context=2",)}  # pinned for more ranks than there are here
RECIPES = [
    path.stem
    for path in sorted(asset("recipes", ".").glob("*.yaml"))
    if load_recipe(path).backend.name == "deepspeed" and path.stem != "quickstart"  # which trains as it is
]
OF_NO_RECIPE = ("qwen3-8b", "gemma-7b", "gpt3-6.7b", "mixtral-8x7b", "qwen3-30b-a3b", "qwen2-57b-a14b")


def shrunken(name: str) -> Recipe:
    """A recipe of the gallery with a model of its family that has two small layers; what makes it that recipe stays."""
    recipe = load_recipe(asset("recipes", f"{name}.yaml"), (*TINY, *SIZES.get(name, ())))
    return replace(recipe, model=small(recipe.model, 2))


def of_a_family(preset: str) -> Recipe:
    recipe = load_recipe(asset("recipes", "quickstart.yaml"), TINY)
    return replace(recipe, model=small(load_preset(preset), 2))


def cases() -> list[dict[str, Any]]:
    made = {name: shrunken(name) for name in RECIPES} | {preset: of_a_family(preset) for preset in OF_NO_RECIPE}
    return [
        as_case(name, DeepSpeed().render(recipe, LAYOUTS.get(name, BY_DATA)), ranks=2) for name, recipe in made.items()
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    return run(cases(), tmp_path_factory.mktemp("gallery"))


@pytest.mark.parametrize("name", [*RECIPES, *OF_NO_RECIPE])
def test_it_learns(trained: dict[str, Ran], name: str) -> None:
    found = trained[name]
    assert found.codes == [0, 0], found.said[-3000:]
    assert len(found.losses) == STEPS
    fall = 0.02 if name.endswith("lora") else 0.3
    assert found.losses[-1] < found.losses[0] - fall, found.losses


def test_every_family_but_deepseek_is_there() -> None:
    """DeepSeek is refused from nothing: Transformers has no balancing loss for it."""
    wanted = {load_preset(preset).family for preset in PRESETS if load_preset(preset).mla is None}
    there = {shrunken(name).model.family for name in RECIPES} | {load_preset(p).family for p in OF_NO_RECIPE}
    assert there == wanted


def test_the_workload_is_what_was_asked() -> None:
    assert all(shrunken(name).workload == Workload(64, 8, "fp32") for name in RECIPES)
