"""What the commands print in JSON keeps the shape that is published beside the docs."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import jsonschema
import pytest

from llmlaunch.calibration.lessons import Lessons
from llmlaunch.calibration.ratios import RunClass, Score, ratio_bound, support_of
from llmlaunch.memory.job import Correction
from llmlaunch.planner.plan_json import plan_json
from llmlaunch.planner.planning import make_plan, make_sized_plan
from support.command_line import CommandLine
from support.plans import gallery_setting, plan_of
from support.recipe_keys import schema
from support.recipes import SMALL

ROOT = Path(__file__).parents[3]


def published(name: str) -> dict[str, object]:
    document: dict[str, object] = json.loads((ROOT / "docs" / "schemas" / f"{name}.schema.json").read_text())
    return document


@cache
def shape(name: str) -> jsonschema.Draft202012Validator:
    """Return the validator of the published schema of that name, checked once to be a schema."""
    jsonschema.Draft202012Validator.check_schema(published(name))
    return jsonschema.Draft202012Validator(published(name))


def test_an_unsafe_plan_has_the_same_shape() -> None:
    shape("plan").validate(plan_json(plan_of("llama3-70b", "nodes=1", "layout={techniques: asked}")))


@pytest.mark.parametrize("share", [0.4, -0.1])
def test_a_plan_that_measured_runs_correct_has_the_same_shape(share: float) -> None:
    few = "layout={context: 1, layers_by_stage: even, techniques: asked}"
    overrides = ("nodes=1", "memory.risk=0.05", "on_oom=fallback", few)
    scores = [Score(1.0, "device", "dense gated", None, 0.7) for _ in range(20)]
    asked = RunClass("h100-80gb", "mixture gated", None)
    lessons = Lessons(
        ratio_bound(scores, asked, 0.05, "an id"), Correction(share, -1e8, "an id"), support_of(scores, asked, "an id")
    )
    plan = plan_json(make_plan(gallery_setting("llama3-8b", *overrides, lessons=lessons)))
    shape("plan").validate(plan)
    assert {rank["terms"]["measured_residual"] > 0 for rank in plan["memory"]["ranks"]} == {share > 0}


@pytest.mark.parametrize("budget", ["{days: 14}", "{gpu_hours: 1, max_nodes: 4}"])
def test_a_plan_with_its_nodes_chosen_has_the_same_shape(budget: str) -> None:
    few = "layout={context: 1, layers_by_stage: even, recompute: none, techniques: asked}"
    _, plan = make_sized_plan(gallery_setting("llama3-8b", "nodes=auto", f"budget={budget}", few))
    shape("plan").validate(plan_json(plan))


def test_the_recipe_schema_in_the_docs_is_the_one_the_program_has() -> None:
    assert published("recipe") == json.loads(json.dumps(schema())), "run: make docs-tables"


def test_check_with_hints_has_the_published_shape(llmlaunch: CommandLine) -> None:
    checked = llmlaunch.json("check", SMALL, "layout={tensor: 16}")
    assert checked["hints"]
    shape("plan").validate(checked)
