"""Every recipe of the gallery is safe as it stands, renders, and says what it is."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from llmlaunch.app.gallery import gallery
from llmlaunch.assets import asset
from llmlaunch.cluster.load import find_accelerator
from llmlaunch.families.hub_ids import preset_names
from llmlaunch.frameworks.framework import backend_for
from llmlaunch.planner.plan import Plan
from llmlaunch.planner.plan_json import plan_json
from llmlaunch.planner.planning import make_plan
from llmlaunch.recipe.types import Recipe
from support.json_schemas import validate
from support.plans import setting_for
from support.recipes import recipe_of
from support.soak import share

DOCS = Path(__file__).parents[3] / "docs"
PLAN_SCHEMA = json.loads((DOCS / "schemas" / "plan.schema.json").read_text())
NAMES = sorted(path.stem for path in asset("recipes").glob("*.yaml"))
# On a CPU, with DeepSpeed, with Megatron-LM, and a mixture: tests/corpus holds the plans of all.
PLANNED = share(NAMES, ("quickstart", "llama2-7b-deepspeed", "mistral-7b", "qwen3-30b-a3b"))


@cache
def loaded(name: str) -> Recipe:
    return recipe_of(name)


@cache
def planned(name: str) -> Plan:
    return make_plan(setting_for(loaded(name)))


@pytest.mark.parametrize("name", PLANNED)
def test_a_recipe_is_safe_as_it_stands_has_the_published_plan_and_renders(name: str) -> None:
    recipe = loaded(name)
    assert (recipe.name, recipe.text) == (name, asset("recipes", f"{name}.yaml").read_text(encoding="utf-8"))
    assert recipe.workload.global_batch_size % recipe.cluster.devices_per_node == 0
    assert planned(name).verdict == "safe"
    validate(plan_json(planned(name)), PLAN_SCHEMA)
    rendered = backend_for(recipe).render(recipe, planned(name).layout)
    assert rendered.program


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_in_its_first_line_what_it_is_and_on_how_many_devices(name: str) -> None:
    first = asset("recipes", f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    recipe = loaded(name)
    assert first.startswith("# ")
    if recipe.cluster.accelerator.kind == "gpu":
        card = recipe.cluster.accelerator.name.split("-")[0].upper()
        assert card in first
        assert str(recipe.nodes) in first or {1: "one", 2: "two", 4: "four", 8: "eight"}[recipe.nodes] in first


def test_the_gallery_reaches_from_small_to_large_over_all_cards_and_both_backends() -> None:
    recipes = [loaded(name) for name in NAMES]
    assert set(gallery()) == set(NAMES)
    gib = {recipe.cluster.accelerator.memory_bytes / 2**30 for recipe in recipes}
    sold_with = {"a100-40gb": 40, "a100-80gb": 80, "h100-94gb": 94, "h200-141gb": 141, "b200": 192}
    assert {find_accelerator(name).memory_bytes / 2**30 for name in sold_with} <= gib
    assert {recipe.backend.name for recipe in recipes} == {"megatron-lm", "megatron-bridge", "deepspeed"}
    assert {recipe.model.family for recipe in recipes} >= {
        *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "deepseek_v2"),
        *("deepseek_v3", "gpt2"),
    }
    assert max(recipe.workload.sequence_length for recipe in recipes) == 131072
    assert any(recipe.techniques.adapters is not None for recipe in recipes)


def test_the_docs_list_the_gallery_and_every_preset() -> None:
    text = (DOCS / "models.md").read_text(encoding="utf-8")
    table = text[text.index("## Gallery") :]
    assert [name for name in NAMES if f"`{name}`" not in table] == []
    models = text[text.index("## Models") : text.index("## Gallery")]
    shortened = {name: f"`-{name.rpartition('-')[2]}`" for name in preset_names()}
    assert [name for name, short in shortened.items() if f"`{name}`" not in models and short not in models] == []
