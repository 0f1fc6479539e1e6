"""The first steps of any run correct the step times of its machine and class of jobs, and a run of the very job gives
its layout's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.app.planned_run import PlannedRun, plan
from llmlaunch.assets import asset
from llmlaunch.calibration import calibrations
from llmlaunch.rendering.run_json import measurement_template
from llmlaunch.store.database import open_store
from llmlaunch.store.measurements import put_collected
from llmlaunch.store.runs import put_plan, put_recipe, put_runs
from llmlaunch.timing.correction import TimeCorrection
from support.command_line import CommandLine
from support.json_schemas import validate
from support.soak import in_soak
from support.timed_runs import records

RECIPE = str(asset("recipes", "llama3-8b.yaml"))
FREE = (  # a few layouts
    "layout={tensor: [1, 2, 4], pipeline: [1, 2], context: 1, micro_batch_size: 1, layers_by_stage: even, "
    "recompute: none, offload_modules: [], offload_layers: 0, offload_optimizer: 0, techniques: asked}"
)
SCHEMA = json.loads((Path(__file__).resolve().parents[3] / "docs" / "schemas" / "plan.schema.json").read_text())
TIME_SCHEMA = Path(__file__).resolve().parents[3] / "docs" / "schemas" / "calibration.schema.json"
PINS = [
    f"layout={{tensor: {t}, pipeline: {p}, virtual_pipeline: 1, context: 1, micro_batch_size: 1, zero_stage: 1, "
    "sequence_parallel: true, layers_by_stage: even, recompute: none, offload_modules: [], offload_layers: 0, "
    "offload_optimizer: 0, techniques: asked}"
    for t, p in ((2, 1), (4, 1), (8, 1), (2, 2), (4, 2))
]


@pytest.fixture(autouse=True)
def megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_LM_PATH", str(tmp_path))


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
    assert checked(llmlaunch)["step_seconds"] > plain
    for nothing in (checked(llmlaunch, "memory.calibration=none"), checked(llmlaunch, "cluster=h200-141gb-x8")):
        assert nothing["step_evidence"]["correction"] is None
    llmlaunch("calibrate", "use", "none", "--backend", "megatron", "--accelerator", "h100-80gb")
    assert checked(llmlaunch)["step_seconds"] == plain


def test_one_of_other_formulas_is_not_used(
    llmlaunch: CommandLine, slow_machine: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(slow_machine)
    plain = checked(llmlaunch)["step_seconds"]
    llmlaunch("calibrate")
    monkeypatch.setattr(calibrations, "estimator_digest", lambda quantity: "0" * 64)
    out, err = llmlaunch("check", RECIPE, PINS[0], "--json")
    assert json.loads(out)["step_seconds"] == plain
    assert "of step times was made for an earlier version of the formula, and is not used" in err


def test_a_run_that_says_nothing_of_step_times_is_left_out(llmlaunch: CommandLine) -> None:
    """Too few steps, no step time, no machine, one that cannot be, and a card that nobody knows."""
    changes: list[dict[str, Any]] = [
        {"observed": {"steps_run": 2}}, {"step_seconds": None}, {"machine": None}, {"machine": {"links": 3}},
        {"gpu": "a card of tomorrow"},
    ]  # fmt: skip
    for number, changed in enumerate(changes):
        stored(records(TimeCorrection(compute=1.1), PINS[:1], id=f"{number}", run_id=f"{number}", **changed))
    assert llmlaunch.json("calibrate")["step_times"] == []


def ran(run: PlannedRun, seconds: float, run_id: str = "r1", attempt: str = "1") -> None:
    """Store an attempt of a run of a plan that goes on, and whose first steps took that long."""
    recipe = run.recipe
    record = {
        **measurement_template(recipe, run.plan),
        **{"schema": 1, "id": f"{run_id}/{attempt}/rank0/device", "run_id": run_id, "attempt": attempt},
        **{"run_state": "running", "step_seconds": seconds, "observed": {"steps_run": 20}, "peak_bytes": 1},
    }
    with open_store() as store, store.write() as connection:
        recipe_id = put_recipe(connection, recipe.name, recipe.digest, recipe.text, recipe.overrides)
        row = {"directory": "/nowhere", "recipe_id": recipe_id, "state": "cancelled"}
        put_runs(connection, {run_id: {**row, "plan_id": put_plan(connection, recipe_id, json.dumps(run.json))}})
        put_collected(connection, [record])


def choice(answer: dict[str, Any]) -> tuple[Any, Any]:
    return answer["layout"], answer["techniques"]


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
    assert "as measured in 1 run" in llmlaunch("check", RECIPE, PINS[0]).stdout
    text = llmlaunch("check", "-v", RECIPE, PINS[0]).stdout
    assert "step time as measured: one run of this very job in this layout (the last is r1), +20.0 %" in text
    neighbour = llmlaunch.json("check", RECIPE, PINS[1])
    assert neighbour["step_evidence"]["measured"] is None
    assert 1.05 * others < neighbour["step_seconds"] < 1.12 * others
    assert sum(neighbour["step_terms"].values()) == pytest.approx(neighbour["step_seconds"])
    assert (
        "step time corrected by runs of this job in other layouts" in llmlaunch("check", "-v", RECIPE, PINS[1]).stdout
    )
    assert checked(llmlaunch, "memory.calibration=none")["step_evidence"]["measured"] is None


@pytest.mark.parametrize("factor", [4.0, *in_soak(0.5)])
def test_a_single_run_never_changes_the_layout(llmlaunch: CommandLine, factor: float) -> None:
    """Whatever it took: all layouts count as much slower or faster, and the screen shows what was measured."""
    first = plan(RECIPE, [FREE])
    ran(first, factor * first.step_seconds)
    again = llmlaunch.json("check", RECIPE, FREE)
    assert choice(again) == (first.layout.as_json(), first.json["techniques"])
    assert again["step_seconds"] == pytest.approx(factor * first.step_seconds)
    assert again["changed_by_runs"] is None
    assert again["tokens_per_second_per_gpu"] == pytest.approx(first.tokens_per_second_per_gpu / factor)
    behind = [each["step_seconds"] for each in again["alternatives"]]
    assert behind == pytest.approx([factor * each.step_seconds for each in first.alternatives])
    assert "Measured: was" not in llmlaunch("check", RECIPE, FREE).stdout


@pytest.mark.usefixtures("all_advice")
def test_the_neighbours_of_a_plan_that_ran_once_are_as_far_from_it_as_before(llmlaunch: CommandLine) -> None:
    def nearby() -> list[float]:
        answer = llmlaunch.json("plan", RECIPE, FREE)
        priced = [each["step_seconds"] for each in answer["neighbours"] if each["step_seconds"] is not None]
        return [seconds / answer["step_seconds"] for seconds in priced]

    before = nearby()
    run = plan(RECIPE, [FREE])
    ran(run, 1.5 * run.step_seconds)
    assert nearby() == pytest.approx(before)


def test_a_single_run_of_another_layout_does_not_make_it_the_plan(llmlaunch: CommandLine) -> None:
    first, other = plan(RECIPE, [FREE]), plan(RECIPE, [PINS[0]])
    ran(other, 0.5 * first.step_seconds)
    assert choice(llmlaunch.json("check", RECIPE, FREE)) == (first.layout.as_json(), first.json["techniques"])


def test_attempts_of_one_run_are_one_run(llmlaunch: CommandLine) -> None:
    first = plan(RECIPE, [FREE])
    for attempt in ("1", "2", "3"):
        ran(first, 1.5 * first.step_seconds, attempt=attempt)
    again = llmlaunch.json("check", RECIPE, FREE)
    assert choice(again) == (first.layout.as_json(), first.json["techniques"])
    assert again["step_evidence"]["measured"]["runs"] == 1


def test_runs_that_disagree_change_nothing(llmlaunch: CommandLine) -> None:
    first = plan(RECIPE, [FREE])
    ran(first, 1.1 * first.step_seconds, "r1")
    ran(first, 2.0 * first.step_seconds, "r2")
    again = llmlaunch.json("check", RECIPE, FREE)
    assert choice(again) == (first.layout.as_json(), first.json["techniques"])
    assert (again["step_evidence"]["measured"]["runs"], again["step_evidence"]["measured"]["agreeing"]) == (2, 0)


def test_two_runs_that_agree_change_the_layout_and_every_screen_says_so(llmlaunch: CommandLine, tmp_path: Path) -> None:
    before = tmp_path / "before.json"
    before.write_text(llmlaunch("check", RECIPE, FREE, "--json").stdout)
    first = plan(RECIPE, [FREE])
    ran(first, 1.5 * first.step_seconds, "r1")
    ran(first, 1.51 * first.step_seconds, "r2")
    again = llmlaunch.json("check", RECIPE, FREE)
    validate({name: value for name, value in again.items() if name != "hints"}, SCHEMA)
    assert choice(again) != (first.layout.as_json(), first.json["techniques"])
    assert first.step_seconds < again["step_seconds"] < 1.5 * first.step_seconds
    changed = again["changed_by_runs"]
    assert choice(changed["was"]) == (first.layout.as_json(), first.json["techniques"])
    assert changed["run_id"] in ("r1", "r2")
    said = f"Measured: was {first.plan.chosen.describe()}, now "
    measured = f"because run {changed['run_id']} and 1 other took "
    for words in (("check",), ("check", "-v"), ("submit", "--dry-run")):
        shown = " ".join(llmlaunch(*words, RECIPE, FREE).stdout.split())
        assert said in shown, words
        assert measured in shown, words
        assert f"{first.step_seconds:.3g} predicted" in shown, words
    after = tmp_path / "after.json"
    after.write_text(json.dumps(again))
    compared = llmlaunch("diff", str(before), str(after), code=1).stdout
    assert f"B: {said}" in " ".join(compared.split())
    assert llmlaunch.json("diff", str(before), str(after), code=1)["b"]["changed_by_runs"] == changed["sentence"]


def test_what_is_too_much_to_be_one_layouts_own_is_all_layouts(llmlaunch: CommandLine) -> None:
    """A machine on which one layout takes four times as long is slow whatever the layout."""
    first = plan(RECIPE, [FREE])
    for run_id in ("r1", "r2"):
        ran(first, 4.0 * first.step_seconds, run_id)
    assert llmlaunch.json("check", RECIPE, FREE)["step_seconds"] > 3.5 * first.step_seconds
