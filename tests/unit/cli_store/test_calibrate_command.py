"""`llmlaunch calibrate` from the outside: what it says, keeps, refuses and goes back to."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from calibrating import BIAS, RECIPE, Cli

from llmlaunch.assets import asset
from llmlaunch.backends.registry import backend_for
from llmlaunch.calibration.cases import Prediction, predict
from llmlaunch.planner.plan import Plan, as_planned
from llmlaunch.planner.planning import make_sized_plan
from llmlaunch.planner.setting import setting_of
from llmlaunch.recipe.load import load_recipe
from llmlaunch.rendering.run_json import run_description
from llmlaunch.rundir.summary import AttemptSummary, RankSummary
from llmlaunch.store import calibrations
from llmlaunch.store.run_records import records_of
from support.hidden_bias import GIB, runs

SCHEMA = Path(__file__).resolve().parents[3] / "docs" / "schemas" / "calibration.schema.json"
WHERE = ("--backend", "megatron-lm", "--accelerator", "h100-80gb")


def test_it_learns_keeps_and_goes_back(cli: Cli) -> None:
    cli.runs(1, 30)
    dry = cli.run("calibrate", "--dry-run")[0]
    assert "megatron on h100-80gb: 30 runs" in dry
    assert "not taken: --dry-run; none is in use" in dry
    assert cli.said("calibrate", "list") == {"calibrations": [], "uses": []}

    text = cli.run("calibrate")[0]
    assert "correction torch +5." in text
    assert "outside +0." in text
    assert "near the limit" in text
    assert "go back with: llmlaunch calibrate use none --backend megatron --accelerator h100-80gb" in text
    (first,) = cli.said("calibrate", "list")["calibrations"]
    jsonschema.validate(first, json.loads(SCHEMA.read_text()))
    assert first["data"]["runs"] == 30
    assert first["errors"]["after"]["mape"] < 0.015 < 0.05 < first["errors"]["before"]["mape"]
    assert cli.said("calibrate", "show", first["id"]) == first
    assert "in use     from" in cli.run("calibrate", "show", first["id"])[0]

    assert f"unchanged, nothing is new since {first['id']}" in cli.run("calibrate")[0]
    cli.runs(2, 40)
    (answer,) = cli.said("calibrate", *WHERE)["answers"]
    assert (answer["did"], answer["before"]) == ("taken", first["id"])
    second = answer["calibration"]["id"]
    assert second != first["id"]

    assert cli.said("calibrate", "use", first["id"])["before"] == second
    assert cli.said("calibrate", "use", "none", *WHERE)["used"] is None
    listed = cli.said("calibrate", "list")
    assert [one["id"] for one in listed["calibrations"]] == [first["id"], second]
    assert [one["calibration_id"] for one in listed["uses"]] == [first["id"], second, first["id"], None]
    assert "in use     never" not in cli.run("calibrate", "show", second)[0]


def test_too_few_runs_are_refused_with_exit_code_0_and_nothing_is_kept(cli: Cli) -> None:
    cli.runs(3, 9)
    (answer,) = cli.said("calibrate")["answers"]
    assert (answer["did"], answer["calibration"]) == ("refused", None)
    assert "10 runs are needed" in answer["why"]
    assert "the store holds 9" in answer["why"]
    assert cli.said("calibrate", "list")["calibrations"] == []


def test_mistakes_are_one_message(cli: Cli) -> None:
    assert "no measured run to learn from" in cli.run("calibrate")[1]
    assert "there is no store yet" in cli.run("calibrate", "show", "nonsense", code=2)[1]
    cli.runs(3, 9)
    assert "it holds: megatron on h100-80gb" in cli.run("calibrate", "--backend", "deepspeed", code=2)[1]
    assert "no such calibration" in cli.run("calibrate", "use", "nonsense", code=2)[1]
    assert "say of what" in cli.run("calibrate", "use", "none", code=2)[1]
    assert "no calibration is in use" in cli.run("calibrate", "use", "none", *WHERE, code=2)[1]
    assert "give options after the word" in cli.run("calibrate", "--json", "list", code=2)[1]


def test_records_that_say_nothing_are_counted_and_harm_nothing(cli: Cli) -> None:
    (record,) = runs(1, BIAS, 1, ["two-8b"])[0][:1]
    odd = [
        {"id": "nothing"},
        {**record, "id": "no sizes", "model": {}},
        {**record, "id": "words", "parallelism": {**record["parallelism"], "tensor": "eight"}},
        {**record, "id": "none", "parallelism": {**record["parallelism"], "tensor": 0}},
        {**record, "id": "cpu", "gpu": "cpu", "peak_kind": "resident"},
        {**record, "id": "words of a message", "peak_kind": "oom", "numbers": {"total_bytes": "much", **OTHERS}},
        {**record, "id": "a card in words", "run_state": "failed", "gpu_memory_bytes": "80GB"},
    ]
    unusual = [
        {**record, "id": "a number of a version", "backend_version": 0.19, "sequence_length": 2049},
        {**record, "id": "a card not told", "gpu_memory_bytes": None, "sequence_length": 2050},
        {**record, "id": "nothing observed", "observed": [], "sequence_length": 2051},
    ]
    cli.imports("odd", [*odd, *unusual])
    cli.runs(1, 12)
    answer = cli.said("calibrate")
    assert sum(answer["left_out"].values()) == len(odd)
    assert [one["runs"] for one in answer["answers"]] == [12 + len(unusual)]


def test_of_two_at_once_one_is_taken_and_the_other_says_so(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one is a process of its own, and faster by as much as this one needs to learn."""
    learn = calibrations.learn

    def slowly(*words: Any) -> Any:
        subprocess.run([sys.executable, "-m", "llmlaunch", "calibrate"], check=True, capture_output=True, timeout=120)
        return learn(*words)

    cli.runs(1, 12)
    monkeypatch.setattr(calibrations, "learn", slowly)
    assert "another `llmlaunch calibrate` was faster" in cli.run("calibrate", code=2)[1]
    assert len(cli.said("calibrate", "list")["calibrations"]) == 1


OTHERS = {"process_bytes": 1, "other_processes_bytes": 2}
PINNED = "layout={tensor: 4, pipeline: 2, context: 1, micro_batch_size: 1, recompute: none, virtual_pipeline: 1}"


def ranks_of_a_plan(cli: Cli) -> list[dict[str, Any]]:
    plan = cli.said("check", RECIPE, PINNED)
    found: list[dict[str, Any]] = plan["memory"]["ranks"]
    return found


def test_what_a_check_predicts_moves_by_the_bias_and_back(cli: Cli) -> None:
    before = ranks_of_a_plan(cli)
    cli.runs(1, 60)
    assert ranks_of_a_plan(cli) == before, "measured runs alone change no prediction"
    (answer,) = cli.said("calibrate")["answers"]
    after = ranks_of_a_plan(cli)
    for old, new in zip(before, after, strict=True):
        outside = old["device_bytes"] - old["reserved_bytes"]
        truth = old["reserved_bytes"] * (1 + BIAS.share) + outside + BIAS.outside_bytes
        assert old["device_bytes"] < 0.95 * truth
        assert new["device_bytes"] == pytest.approx(truth, rel=0.01)
        assert sum(new["terms"].values()) == new["device_bytes"]
        assert new["terms"]["measured_residual"] > 0
    cli.run("calibrate", "use", "none", *WHERE)
    assert ranks_of_a_plan(cli) == before
    cli.run("calibrate", "use", answer["calibration"]["id"])
    assert ranks_of_a_plan(cli) == after


def test_a_check_at_a_risk_says_how_many_runs_stand_behind_it(cli: Cli) -> None:
    cli.runs(1, 60)
    cli.run("calibrate")
    memory = cli.said("check", RECIPE, "memory.risk=0.1")["memory"]
    (kept,) = cli.said("calibrate", "list")["calibrations"]
    bound = next(one for one in kept["errors"]["after"]["bounds"] if one["risk"] == 0.1)
    worse = max(bound["ratio"], bound["near_limit_ratio"])
    assert memory["runs"] == bound["runs"] >= 50
    assert kept["id"] in memory["margin"]
    assert f"{worse:.3f} times" in memory["margin"]


# Jobs a site would run: models, lengths and splits of the gallery.
JOBS = [
    (name, f"layout={{tensor: {tensor}, pipeline: {pipeline}, context: 1}}", f"training.sequence_length={length}")
    for name, tensor, pipeline in (
        ("llama3-8b", 2, 1),
        ("llama3-8b", 8, 2),
        ("llama3-70b", 8, 4),
        ("mixtral-8x7b", 2, 4),
    )
    for length in (1024, 2048, 4096)
] + [
    ("llama3-8b", "layout={tensor: 4, pipeline: 1, context: 1}", f"training.sequence_length={n}") for n in (1536, 3072)
]


def planned(name: str, *words: str) -> tuple[dict[str, Any], Plan]:
    """run.json of a recipe, and its plan."""
    recipe = load_recipe(asset("recipes", f"{name}.yaml"), words)
    backend = backend_for(recipe)
    setting, plan = make_sized_plan(setting_of(recipe, backend))
    recipe = setting.recipe
    rendered = backend.render(as_planned(recipe, plan.chosen), plan.layout)
    return dict(run_description(as_planned(recipe, plan.chosen), plan, rendered)), plan


def left_behind(rng: random.Random, number: int, run: dict[str, Any], plan: Plan) -> list[dict[str, Any]]:
    """The records of one attempt of it: two global ranks of each stage were seen by driver and probe."""
    ranks = []
    for rank in range(2 * len(plan.estimate.ranks)):
        stage = plan.estimate.ranks[rank // 2]
        torch = round(stage.reserved_bytes * (1 + BIAS.share + rng.gauss(0.0, BIAS.noise)))
        outside = round(stage.device_bytes - stage.reserved_bytes + BIAS.outside_bytes + rng.gauss(0.0, 0.05 * GIB))
        ranks.append(
            RankSummary(
                rank, stage.pipeline_rank, node="n1", peak_bytes=torch + outside, peak_source="nvml accounting",
                reserved_peak_bytes=torch, allocated_peak_bytes=round(0.97 * torch), outside_torch_bytes=outside,
                alloc_retries=0, baseline_bytes=500 * 2**20, device_total_bytes=80 * GIB,
            )
        )  # fmt: skip
    summary = AttemptSummary("1.0", tuple(ranks), steps_run=100)
    return list(records_of(run, f"run-{number}", summary, "succeeded").records)


GALLERY = [
    "llama3-8b",
    "llama3.1-8b-a100-40gb",
    "qwen2.5-72b",
    "gemma2-9b",
    "deepseek-v3",
    "llama3.1-70b-lora",
    "gpt3-175b",
]


@pytest.mark.parametrize("name", GALLERY)
def test_the_records_of_a_run_are_priced_as_its_plan_was(name: str) -> None:
    """Otherwise a calibration would learn the difference between two of our own formulas."""
    run, plan = planned(name)
    (one,) = predict([run["measurement"]])
    assert isinstance(one, Prediction), one
    assert (one.reserved + one.outside).tolist() == [rank.device_bytes for rank in plan.estimate.ranks]


SCRIPT = "backend={{name: deepspeed, script: /home/me/train.py, script_kind: {}}}"


def test_the_record_of_split_sequences_is_priced_as_its_plan_was() -> None:
    """The optimizer step is the peak, where a bucket of ZeRO 3 lies too."""
    layout = "layout={context: 2, zero_stage: 3, recompute: full, micro_batch_size: 1}"
    run, plan = planned("llama2-7b-deepspeed", "cluster=h100-80gb-x8", "nodes=1", layout)
    (one,) = predict([run["measurement"]])
    assert isinstance(one, Prediction), one
    assert (one.reserved + one.outside).tolist() == [rank.device_bytes for rank in plan.estimate.ranks]


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("hugging-face", ()),
        ("own", ("layout={zero_stage: 3, offload_optimizer: 0.5}",)),
        ("pipeline", ("layout={pipeline: 4, zero_stage: 1}",)),
        ("megatron-deepspeed", ("layout={pipeline: 2, tensor: 2, zero_stage: 1}",)),
        ("megatron-deepspeed", ("layout={context: 2, tensor: 2, zero_stage: 1}",)),
    ],
)
def test_the_record_of_a_script_of_ones_own_is_priced_as_its_plan_was(kind: str, overrides: tuple[str, ...]) -> None:
    data = "data={mock: false, path: /data/tokens, tokenizer: GPT2BPETokenizer}" if "megatron" in kind else "name=x"
    run, plan = planned("llama2-7b-deepspeed", SCRIPT.format(kind), "cluster=h100-80gb-x8", data, *overrides)
    (one,) = predict([run["measurement"]])
    assert isinstance(one, Prediction), one
    assert (one.reserved + one.outside).tolist() == [rank.device_bytes for rank in plan.estimate.ranks]


def test_what_runs_of_plans_leave_behind_corrects_the_next_plan(cli: Cli) -> None:
    rng = random.Random(4)
    found = [left_behind(rng, number, *planned(*job, "cluster=h100-80gb-x8")) for number, job in enumerate(JOBS)]
    before = cli.said("check", RECIPE, PINNED)["memory"]["ranks"]
    cli.imports("runs", [record for run in found for record in run])
    (answer,) = cli.said("calibrate")["answers"]
    assert (answer["did"], answer["runs"]) == ("taken", len(JOBS))
    data = answer["calibration"]["data"]
    assert data["records"] == sum(record["peak_kind"] != "host" for run in found for record in run)
    assert len(data["families"]) == 2
    after = cli.said("check", RECIPE, PINNED)["memory"]["ranks"]
    for old, new in zip(before, after, strict=True):
        truth = old["device_bytes"] + old["reserved_bytes"] * BIAS.share + BIAS.outside_bytes
        assert new["device_bytes"] == pytest.approx(truth, rel=0.01)


def test_runs_planned_with_a_calibration_keep_it_right(cli: Cli) -> None:
    """The second round learns from runs whose plans were corrected: records are priced without any correction, so
    nothing is corrected twice."""
    rng = random.Random(5)
    found = [left_behind(rng, number, *planned(*job, "cluster=h100-80gb-x8")) for number, job in enumerate(JOBS)]
    cli.imports("first", [record for run in found for record in run])
    (first,) = cli.said("calibrate")["answers"]
    again = [left_behind(rng, 100 + number, *planned(*job, "cluster=h100-80gb-x8")) for number, job in enumerate(JOBS)]
    cli.imports("second", [{**record, "calibration_id": first["calibration"]["id"]} for run in again for record in run])
    (second,) = cli.said("calibrate")["answers"]
    assert second["did"] == "taken", second["why"]
    for name, size in (("torch_share", 0.006), ("outside_bytes", 0.15 * GIB)):
        old, new = (answer["calibration"]["correction"][name] for answer in (first, second))
        assert new == pytest.approx(old, abs=size)
