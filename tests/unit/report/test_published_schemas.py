"""What the commands print in JSON keeps the shape that is published beside the docs."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from llmlaunch.assets import asset
from llmlaunch.backends.registry import backend_for
from llmlaunch.calibration.accuracy import scored
from llmlaunch.calibration.machines import clusters_by_gpu
from llmlaunch.calibration.read import read_records
from llmlaunch.planner.plan_json import plan_json
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.sized import make_sized_plan
from llmlaunch.recipe.json_schema import schema
from llmlaunch.recipe.load import load_recipe
from llmlaunch.report.accuracy_json import accuracy_json

ROOT = Path(__file__).parents[3]
RECIPES = sorted(asset("recipes").glob("*.yaml"))


def published(name: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((ROOT / "docs" / "schemas" / f"{name}.schema.json").read_text())
    return found


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_every_shipped_recipe_is_safe_and_its_plan_has_the_published_shape(path: Path) -> None:
    recipe = load_recipe(path)
    plan = make_plan(recipe, backend_for(recipe))
    assert plan.safe
    jsonschema.validate(plan_json(plan), published("plan"))


def test_an_unsafe_plan_has_the_same_shape() -> None:
    recipe = load_recipe(asset("recipes", "llama3-70b.yaml"), ["nodes=1"])
    jsonschema.validate(plan_json(make_plan(recipe, backend_for(recipe))), published("plan"))


@pytest.mark.parametrize("budget", ["{days: 14}", "{gpu_hours: 1, max_nodes: 4}", "{max_nodes: 2}"])
def test_a_plan_with_its_nodes_chosen_has_the_same_shape(budget: str) -> None:
    recipe = load_recipe(asset("recipes", "llama3-70b.yaml"), ["nodes=auto", f"budget={budget}"])
    _, plan = make_sized_plan(recipe, backend_for(recipe))
    jsonschema.validate(plan_json(plan), published("plan"))


@pytest.mark.parametrize("anchors", [False, True])
def test_accuracy_has_the_published_shape(anchors: bool) -> None:
    found = [
        scored(record, {})
        for name in ("fit", "outcomes")
        for record in read_records(ROOT / "tests" / "data" / "measurements" / f"{name}.jsonl")
    ]
    answer = accuracy_json(found, clusters_by_gpu(), anchors)
    jsonschema.validate(json.loads(json.dumps(answer)), published("accuracy"))


def test_the_recipe_schema_in_the_docs_is_the_one_the_program_has() -> None:
    assert published("recipe") == json.loads(json.dumps(schema())), (
        "run: python -m llmlaunch.recipe.json_schema > docs/schemas/recipe.schema.json"
    )
