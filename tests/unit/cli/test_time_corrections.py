"""The first steps of any run correct the step times of its machine and class of jobs, and a run of the very job gives
its layout's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.app.planned_run import PlannedRun, plan
from llmlaunch.assets import asset
from llmlaunch.calibration import time_calibrations
from llmlaunch.rendering.run_json import measurement_template
from llmlaunch.store.database import open_store
from llmlaunch.store.measurements import put_collected
from llmlaunch.store.runs import put_plan, put_recipe, put_runs
from llmlaunch.timing.correction import TimeCorrection
from support.command_line import CommandLine
from support.json_schemas import validate
from support.timed_runs import records

RECIPE = str(asset("recipes", "llama3-8b.yaml"))
SCHEMA = json.loads((Path(__file__).resolve().parents[3] / "docs" / "schemas" / "plan.schema.json").read_text())
TIME_SCHEMA = Path(__file__).resolve().parents[3] / "docs" / "schemas" / "time-calibration.schema.json"
PINS = [
    f"layout={{tensor: {t}, pipeline: {p}, virtual_pipeline: 1, context: 1, micro_batch_size: 1, zero_stage: 1, "
    "sequence_parallel: true, layers_by_stage: even, recompute: none, offload_modules: [], offload_layers: 0, "
    "offload_optimizer: 0, techniques: asked}"
    for t, p in ((2, 1), (4, 1), (8, 1), (2, 2), (4, 2))
]


@pytest.fixture(scope="module")
def slow_machine() -> list[dict[str, Any]]:
    """Runs on a machine whose devices take a tenth longer."""
    return records(TimeCorrection(compute=1.1), PINS)


def stored(timed: list[dict[str, Any]]) -> None:
    with open_store() as store, store.write() as connection:
        put_collected(connection, timed)


def checked(llmlaunch: CommandLine, *overrides: str) -> dict[str, Any]:
    answer: dict[str, Any] = llmlaunch.json("check", RECIPE, PINS[0], *overrides)
    validate({name: value for name, value in answer.items() if name != "hints"}, SCHEMA)
    return answer


def test_runs_correct_the_next_check_and_it_says_so(llmlaunch: CommandLine, slow_machine: list[dict[str, Any]]) -> None:
    plain = checked(llmlaunch)
    assert plain["step_evidence"]["correction"] is None
    stored(slow_machine)
    text = llmlaunch("calibrate").stdout
    assert "megatron, step time of dense models on h100-80gb x8" in text
    assert "go back with: llmlaunch calibrate use none --backend megatron --accelerator h100-80gb" in text
    corrected = checked(llmlaunch)
    evidence = corrected["step_evidence"]
    assert evidence["uncorrected_seconds"] == plain["step_seconds"]
    assert evidence["correction"]["compute"] == pytest.approx(1.1, abs=0.02)
    assert evidence["correction"]["runs"] == len(PINS)
    assert corrected["step_seconds"] == pytest.approx(slow_machine[0]["step_seconds"], rel=0.02)
    assert corrected["mfu"] < plain["mfu"]
    change = f"{100 * (corrected['step_seconds'] / plain['step_seconds'] - 1):+.1f} %"
    assert (
        f"step time corrected by 5 runs on this cluster: {change}" in llmlaunch("check", "-v", RECIPE, PINS[0]).stdout
    )


def test_it_is_kept_listed_and_left_again(llmlaunch: CommandLine, slow_machine: list[dict[str, Any]]) -> None:
    stored(slow_machine)
    plain = checked(llmlaunch)["step_seconds"]
    assert llmlaunch.json("calibrate", "--dry-run")["step_times"][0]["did"] == "not taken"
    taken = llmlaunch.json("calibrate")["step_times"][0]
    validate(taken["calibration"], json.loads(TIME_SCHEMA.read_text()))
    assert llmlaunch.json("calibrate")["step_times"][0]["did"] == "unchanged"
    name = taken["calibration"]["id"]
    assert llmlaunch.json("calibrate", "show", name) == taken["calibration"]
    assert "compute +9." in llmlaunch("calibrate", "list").stdout
    assert "in use     from" in llmlaunch("calibrate", "show", name).stdout
    assert checked(llmlaunch)["step_seconds"] > plain
    for nothing in (checked(llmlaunch, "memory.calibration=none"), checked(llmlaunch, "cluster=h200-141gb-x8")):
        assert nothing["step_evidence"]["correction"] is None
    llmlaunch("calibrate", "use", "none", "--backend", "megatron", "--accelerator", "h100-80gb")
    assert checked(llmlaunch)["step_seconds"] == plain
    llmlaunch("calibrate", "use", name)
    assert checked(llmlaunch)["step_seconds"] > plain


def test_one_of_other_formulas_is_not_used(
    llmlaunch: CommandLine, slow_machine: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(slow_machine)
    plain = checked(llmlaunch)["step_seconds"]
    llmlaunch("calibrate")
    time_calibrations.timing_digest.cache_clear()
    monkeypatch.setattr(time_calibrations, "MODULES", (*time_calibrations.MODULES, "timing/network.py"))
    try:
        out, err = llmlaunch("check", RECIPE, PINS[0], "--json")
    finally:
        time_calibrations.timing_digest.cache_clear()
    assert json.loads(out)["step_seconds"] == plain
    assert "of step times was made for an earlier version of the formula, and is not used" in err


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"observed": {"steps_run": 2}}, id="too few steps"),
        pytest.param({"step_seconds": None}, id="no step time"),
        pytest.param({"machine": None}, id="no machine"),
        pytest.param({"machine": {"links": 3}}, id="a machine that is none"),
        pytest.param({"gpu": "a card of tomorrow"}, id="no known card"),
    ],
)
def test_what_tells_nothing_of_step_times_is_left_out(llmlaunch: CommandLine, changes: dict[str, Any]) -> None:
    stored(records(TimeCorrection(compute=1.1), PINS[:1], **changes))
    assert llmlaunch.json("calibrate")["step_times"] == []


def ran(run: PlannedRun, seconds: float) -> None:
    """Store a run of a plan that goes on, and whose first steps took that long."""
    recipe = run.recipe
    record = {
        **measurement_template(recipe, run.plan, run.rendered),
        **{"schema": 1, "id": "r1/1/rank0/device", "run_id": "r1", "attempt": "1", "run_state": "running"},
        **{"step_seconds": seconds, "observed": {"steps_run": 20}, "peak_bytes": 1},
    }
    with open_store() as store, store.write() as connection:
        recipe_id = put_recipe(connection, recipe.name, recipe.digest, recipe.text, recipe.overrides)
        row = {"directory": "/nowhere", "recipe_id": recipe_id, "state": "cancelled"}
        put_runs(connection, {"r1": {**row, "plan_id": put_plan(connection, recipe_id, json.dumps(run.json))}})
        put_collected(connection, [record])


def test_one_run_of_the_very_job_gives_its_layouts_step_time_and_moves_the_others_a_part(
    llmlaunch: CommandLine,
) -> None:
    others = llmlaunch.json("check", RECIPE, PINS[1])["step_seconds"]
    run = plan(RECIPE, [PINS[0]])
    seconds = 1.2 * run.step_seconds
    ran(run, seconds)
    answer = checked(llmlaunch)
    assert answer["step_seconds"] == pytest.approx(seconds)
    assert sum(answer["step_terms"].values()) == pytest.approx(seconds)
    assert answer["step_evidence"]["measured"]["run_id"] == "r1"
    text = llmlaunch("check", "-v", RECIPE, PINS[0]).stdout
    assert "step time as measured: one attempt of this very job in this layout (the last is r1)" in text
    neighbour = llmlaunch.json("check", RECIPE, PINS[1])
    assert neighbour["step_evidence"]["measured"] is None
    assert 1.05 * others < neighbour["step_seconds"] < 1.12 * others
    assert (
        "step time corrected by runs of this job in other layouts" in llmlaunch("check", "-v", RECIPE, PINS[1]).stdout
    )
    assert checked(llmlaunch, "memory.calibration=none")["step_evidence"]["measured"] is None


def test_a_layout_that_ran_much_slower_than_predicted_is_not_chosen_again(llmlaunch: CommandLine) -> None:
    first = plan(RECIPE)
    ran(first, 1.5 * first.step_seconds)
    again = llmlaunch.json("check", RECIPE)
    assert (again["layout"], again["techniques"]) != (first.layout.as_json(), first.json["techniques"])
    assert first.step_seconds < again["step_seconds"] < 1.5 * first.step_seconds


def test_what_is_too_much_to_be_one_layouts_own_is_all_layouts(llmlaunch: CommandLine) -> None:
    """A machine on which one layout takes four times as long is slow whatever the layout."""
    first = plan(RECIPE)
    ran(first, 4.0 * first.step_seconds)
    assert llmlaunch.json("check", RECIPE)["step_seconds"] > 3.5 * first.step_seconds
