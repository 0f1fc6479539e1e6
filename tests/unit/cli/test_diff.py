"""`llmlaunch diff`: what differs between two recipes, plans or runs, and what it costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.command_line import CommandLine
from support.json_schemas import validate
from support.recipes import recipe_text

SCHEMA = Path(__file__).resolve().parents[3] / "docs" / "schemas" / "diff.schema.json"
PINS = (
    "{tensor: 2, pipeline: 2, context: 1, micro_batch_size: 1, recompute: none, offload_optimizer: 0, "
    "layers_by_stage: even, techniques: asked}"
)
OWN = "environment: {MY_SETTING: inside-of-mine, OTHER: the-same}\n"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe with a pinned layout in a folder of its own, which is the current one."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.yaml"
    path.write_text(recipe_text(layout=PINS) + OWN)
    return path


def changed(recipe: Path, name: str, **lines: str) -> Path:
    """Return a copy of the recipe with lines of it replaced."""
    other = recipe.with_name(name)
    kept = [line for line in recipe.read_text().splitlines() if line.partition(":")[0] not in lines]
    other.write_text("\n".join([*kept, *(f"{key}: {value}" for key, value in lines.items())]) + "\n")
    return other


def names(result: dict[str, Any], section: str) -> list[str]:
    return [change["name"] for change in result[section]]


def test_a_recipe_is_equal_to_itself_and_to_another_order_of_its_keys(llmlaunch: CommandLine, recipe: Path) -> None:
    assert "No difference." in llmlaunch("diff", recipe, recipe).stdout
    reordered = recipe.with_name("b.yaml")
    reordered.write_text("\n".join(reversed(recipe.read_text().splitlines())) + "\n")
    result = llmlaunch.json("diff", recipe, reordered)
    assert result["differ"] is False
    assert not any(result[section] for section in ("recipe", "layout", "arguments", "memory_terms", "totals"))


def test_two_recipes_show_keys_layout_arguments_memory_and_time(llmlaunch: CommandLine, recipe: Path) -> None:
    other = changed(recipe, "b.yaml", layout=PINS.replace("pipeline: 2", "pipeline: 4"))
    result = llmlaunch.json("diff", recipe, other, code=1)
    validate(result, json.loads(SCHEMA.read_text()))
    assert result["recipe"] == [{"name": "layout.pipeline", "a": 2, "b": 4}]
    assert {"name": "data", "a": 8, "b": 4} in result["layout"]
    assert "command.txt --pipeline-model-parallel-size" in names(result, "arguments")
    plans = [llmlaunch.json("check", path) for path in (recipe, other)]
    steps = [plan["step_seconds"] for plan in plans]
    assert {"name": "step_seconds", "a": steps[0], "b": steps[1]} in result["totals"]
    bubble = [plan["step_terms"]["pipeline_bubble"] for plan in plans]
    assert {"name": "pipeline_bubble", "a": bubble[0], "b": bubble[1]} in result["time_terms"]
    worst = [plan["memory"]["ranks"][plan["memory"]["worst_pipeline_rank"]]["terms"] for plan in plans]
    states = {"name": "parameters", "a": worst[0]["parameters"], "b": worst[1]["parameters"]}
    assert states in result["memory_terms"]
    text = llmlaunch("diff", recipe, other, code=1).stdout
    assert max(map(len, text.replace(f"{recipe.parent}/", "").splitlines())) <= 80  # a path is as long as it is
    for part in ("Recipe", "Layout", "Rendered arguments", "Memory of", "Time of", "step seconds"):
        assert part in text


def test_values_that_may_be_secrets_are_never_shown(llmlaunch: CommandLine, recipe: Path) -> None:
    token = "hf_" + "Ab3" * 12
    other = changed(
        recipe,
        "b.yaml",
        environment=f"{{MY_SETTING: other-of-mine, OTHER: the-same, HF_TOKEN: {token}}}",
        not_secrets="[environment.HF_TOKEN]",
    )
    answer = llmlaunch("diff", recipe, other, code=1)
    written = llmlaunch("diff", recipe, other, "--json", code=1)
    for text in (*answer, *written):
        assert token not in text
    assert {"name": "environment.MY_SETTING", "a": "(not shown)", "b": "(not shown)"} in json.loads(written.stdout)[
        "recipe"
    ]


def test_a_run_is_compared_with_its_recipe_its_plan_and_another_run(
    llmlaunch: CommandLine, recipe: Path, tmp_path: Path
) -> None:
    for name, steps in (("one", 10), ("two", 20)):
        llmlaunch("render", recipe, f"training.steps={steps}", "-o", name)
    own = llmlaunch.json("diff", "./one", tmp_path / "one" / "plan.json")
    assert own["differ"] is False
    assert own["recipe"] is None
    assert own["arguments"] is None
    assert llmlaunch.json("diff", recipe, "./one", code=0)["differ"] is False
    other = llmlaunch.json("diff", "./one", "./two", code=1)
    assert other["recipe"] == [{"name": "training.steps", "a": 10, "b": 20}]
    assert other["layout"] == other["memory_terms"] == other["time_terms"] == []
    assert {"name": "command.txt --train-iters", "a": "10", "b": "20"} in other["arguments"]


def test_what_runs_measured_is_shown_and_decides_nothing(llmlaunch: CommandLine, recipe: Path, tmp_path: Path) -> None:
    for name, seconds in (("one", 3.0), ("two", 4.0)):
        llmlaunch("render", recipe, "-o", name)
        attempt = tmp_path / name / "attempts" / "77.0"
        attempt.mkdir()
        (attempt / "progress.json").write_text(json.dumps({"schema": 1, "step": 9, "step_seconds": seconds}))
    result = llmlaunch.json("diff", "./one", "./two")
    assert result["measured"] == [{"name": "step_seconds", "a": 3.0, "b": 4.0}]
    text = llmlaunch("diff", "./one", "./two").stdout
    assert "+33.3 %" in text
    assert "No difference." in text


def test_locks_are_compared_with_each_other_and_with_recipes(llmlaunch: CommandLine, recipe: Path) -> None:
    other = changed(recipe, "b.yaml", layout=PINS.replace("tensor: 2", "tensor: 4"))
    for path in (recipe, other):
        llmlaunch("plan", path, "--lock")
    result = llmlaunch.json("diff", "a.lock.yaml", "b.lock.yaml", code=1)
    assert {"name": "tensor", "a": 2, "b": 4} in result["layout"]
    assert result["recipe"] is None
    assert names(result, "totals") == ["device_bytes", "step_seconds"]
    assert llmlaunch.json("diff", "a.lock.yaml", recipe)["differ"] is False


def test_a_recipe_without_a_layout_is_compared_by_its_keys(llmlaunch: CommandLine, recipe: Path) -> None:
    other = changed(recipe, "b.yaml", layout=PINS.replace("pipeline: 2", "pipeline: 1, virtual_pipeline: 4"))
    result = llmlaunch.json("diff", recipe, other, code=1)
    assert {"name": "layout.virtual_pipeline", "a": None, "b": 4} in result["recipe"]
    assert result["layout"] is None
    assert "layout.virtual_pipeline" in result["b"]["unplanned"]
    assert "B has no plan" in llmlaunch("diff", recipe, other, code=1).stdout


def test_what_cannot_be_read_is_one_message(llmlaunch: CommandLine, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "no-plan.json").write_text('{"layout": 3}')
    (tmp_path / "torn.json").write_text('{"layout": {}, "memory": {"ranks": [{}]}}')
    (tmp_path / "folder").mkdir()
    llmlaunch("render", recipe, "-o", "damaged")
    (tmp_path / "damaged" / "run.json").write_text('{"schema": 1, "overrides": [3]}')
    for name in ("no-plan.json", "torn.json", "folder", "missing.yaml", "x" * 5000, "./damaged"):
        error = llmlaunch("diff", recipe, name, code=2).stderr
        assert error.startswith("error: "), name
        assert len(error.strip().splitlines()) == 1
