"""`llmlaunch calibrate` from the outside: what it says, keeps, refuses and goes back to."""

from __future__ import annotations

import json
import random
import re
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.assets import asset
from llmlaunch.calibration.cases import Prediction
from llmlaunch.frameworks.framework import backend_for
from llmlaunch.planner.plan import Plan, as_planned
from llmlaunch.planner.planning import make_sized_plan
from llmlaunch.planner.setting import setting_of
from llmlaunch.rendering.run_json import run_description
from llmlaunch.rundir.summary import AttemptSummary, RankSummary
from llmlaunch.store import calibrations
from llmlaunch.store.database import open_store
from llmlaunch.store.run_records import records_of
from support.command_line import CommandLine
from support.hidden_bias import BIAS, GIB, runs, site_records
from support.json_schemas import validate
from support.measured_runs import predictions
from support.recipes import recipe_of
from support.soak import in_soak

RECIPE = str(asset("recipes", "llama3-8b.yaml"))
SCHEMA = Path(__file__).resolve().parents[3] / "docs" / "schemas" / "calibration.schema.json"
WHERE = ("--backend", "megatron-lm", "--accelerator", "h100-80gb")


def test_it_learns_keeps_and_goes_back(llmlaunch: CommandLine) -> None:
    llmlaunch.import_records(site_records(1, 30))
    dry = llmlaunch("calibrate", "--dry-run").stdout
    assert "megatron on h100-80gb: 30 runs" in dry
    assert "not taken: --dry-run; none is in use" in dry
    assert llmlaunch.json("calibrate", "list") == {"calibrations": [], "step_times": [], "uses": []}

    text = llmlaunch("calibrate").stdout
    learned = re.search(r"correction torch \+(\d\.\d) %", text)
    assert learned, text
    assert float(learned[1]) == pytest.approx(5.0, abs=0.5)
    assert "outside +0." in text
    assert "near the limit" in text
    assert "go back with: llmlaunch calibrate use none --backend megatron --accelerator h100-80gb" in text
    (first,) = llmlaunch.json("calibrate", "list")["calibrations"]
    validate(first, json.loads(SCHEMA.read_text()))
    assert first["data"]["runs"] == 30
    assert first["errors"]["after"]["mape"] < 0.015 < 0.05 < first["errors"]["before"]["mape"]
    assert llmlaunch.json("calibrate", "show", first["id"]) == first
    assert "in use     from" in llmlaunch("calibrate", "show", first["id"]).stdout

    assert f"unchanged, nothing is new since {first['id']}" in " ".join(llmlaunch("calibrate").stdout.split())
    llmlaunch.import_records(site_records(2, 40))
    (answer,) = llmlaunch.json("calibrate", *WHERE)["answers"]
    assert (answer["did"], answer["before"]) == ("taken", first["id"])
    second = answer["calibration"]["id"]
    assert second != first["id"]

    assert llmlaunch.json("calibrate", "use", first["id"])["before"] == second
    assert llmlaunch.json("calibrate", "use", "none", *WHERE)["used"] is None
    listed = llmlaunch.json("calibrate", "list")
    assert [calibration["id"] for calibration in listed["calibrations"]] == [first["id"], second]
    assert [use["calibration_id"] for use in listed["uses"]] == [first["id"], second, first["id"], None]
    assert "in use     never" not in llmlaunch("calibrate", "show", second).stdout


def test_too_few_runs_are_refused_with_exit_code_0_and_nothing_is_kept(llmlaunch: CommandLine) -> None:
    llmlaunch.import_records(site_records(3, 9))
    (answer,) = llmlaunch.json("calibrate")["answers"]
    assert (answer["did"], answer["calibration"]) == ("refused", None)
    assert "10 runs are needed" in answer["why"]
    assert "the store holds 9" in answer["why"]
    assert llmlaunch.json("calibrate", "list")["calibrations"] == []


def test_mistakes_are_one_message(llmlaunch: CommandLine) -> None:
    assert "no measured run to learn from" in llmlaunch("calibrate").stderr
    assert "there is no store yet" in llmlaunch("calibrate", "show", "nonsense", code=2).stderr
    llmlaunch.import_records(site_records(3, 9))
    assert "it holds: megatron on h100-80gb" in llmlaunch("calibrate", "--backend", "deepspeed", code=2).stderr
    assert "no such calibration" in llmlaunch("calibrate", "use", "nonsense", code=2).stderr
    assert "say of what" in llmlaunch("calibrate", "use", "none", code=2).stderr
    assert "no calibration is in use" in llmlaunch("calibrate", "use", "none", *WHERE, code=2).stderr
    assert "give options after the word" in llmlaunch("calibrate", "--json", "list", code=2).stderr


def test_records_that_say_nothing_are_counted_and_harm_nothing(llmlaunch: CommandLine) -> None:
    (record,) = runs(1, BIAS, 1, ["two-8b"])[0][:1]
    odd = [
        {"id": "nothing"},
        {**record, "id": "no sizes", "recipe": {**record["recipe"], "model": {}}},
        {**record, "id": "words", "layout": {**record["layout"], "tensor": "eight"}},
        {**record, "id": "none", "layout": {**record["layout"], "tensor": 0}},
        {**record, "id": "cpu", "gpu": "cpu", "peak_kind": "resident"},
        {**record, "id": "words of a message", "peak_kind": "oom", "numbers": {"total_bytes": "much", **OTHERS}},
        {**record, "id": "a card in words", "run_state": "failed", "gpu_memory_bytes": "80GB"},
        {**record, "id": "a number of a version", "backend_version": 0.19, "sequence_length": 2052},
        {**record, "id": "a list of what was observed", "observed": [], "sequence_length": 2053},
    ]
    unusual = [
        {**record, "id": "a version not told", "backend_version": None, "sequence_length": 2049},
        {**record, "id": "a card not told", "gpu_memory_bytes": None, "sequence_length": 2050},
        {**record, "id": "nothing observed", "observed": {}, "sequence_length": 2051},
    ]
    llmlaunch.import_records([*odd, *unusual])
    llmlaunch.import_records(site_records(1, 12))
    answer = llmlaunch.json("calibrate")
    assert sum(answer["left_out"].values()) == len(odd)
    assert [calibrated["runs"] for calibrated in answer["answers"]] == [12 + len(unusual)]


def test_of_two_at_once_one_is_taken_and_the_other_says_so(
    llmlaunch: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is faster by as much as this one needs to learn."""
    learn = calibrations.learn

    def slowly(*arguments: Any) -> Any:
        monkeypatch.setattr(calibrations, "learn", learn)
        with open_store() as store:
            assert [answer.did for answer in calibrations.calibrate(store, time.time()).answers] == ["taken"]
        return learn(*arguments)

    llmlaunch.import_records(site_records(1, 12))
    monkeypatch.setattr(calibrations, "learn", slowly)
    assert "another `llmlaunch calibrate` was faster" in llmlaunch("calibrate", code=2).stderr
    assert len(llmlaunch.json("calibrate", "list")["calibrations"]) == 1


OTHERS = {"process_bytes": 1, "other_processes_bytes": 2}
PINNED = (
    "layout={tensor: 4, pipeline: 2, context: 1, micro_batch_size: 1, recompute: none, virtual_pipeline: 1, "
    "layers_by_stage: even, offload_modules: [], offload_layers: 0, offload_optimizer: 0, techniques: asked}"
)


def ranks_of_a_plan(llmlaunch: CommandLine) -> list[dict[str, Any]]:
    return list(llmlaunch.json("check", RECIPE, PINNED)["memory"]["ranks"])


def test_what_a_check_predicts_moves_by_the_bias_and_back(llmlaunch: CommandLine) -> None:
    before = ranks_of_a_plan(llmlaunch)
    llmlaunch.import_records(site_records(1, 60))
    assert ranks_of_a_plan(llmlaunch) == before, "measured runs alone change no prediction"
    (answer,) = llmlaunch.json("calibrate")["answers"]
    after = ranks_of_a_plan(llmlaunch)
    for old, new in zip(before, after, strict=True):
        outside = old["device_bytes"] - old["reserved_bytes"]
        truth = old["reserved_bytes"] * (1 + BIAS.share) + outside + BIAS.outside_bytes
        assert old["device_bytes"] < 0.95 * truth
        assert new["device_bytes"] == pytest.approx(truth, rel=0.01)
        assert sum(new["terms"].values()) == new["device_bytes"]
        assert new["terms"]["measured_residual"] > 0
    llmlaunch("calibrate", "use", "none", *WHERE)
    assert ranks_of_a_plan(llmlaunch) == before
    llmlaunch("calibrate", "use", answer["calibration"]["id"])
    assert ranks_of_a_plan(llmlaunch) == after


ALIKE = "context: 1, micro_batch_size: 1, layers_by_stage: even, techniques: asked"
# Jobs a site would run: models, lengths and splits of the gallery.
JOBS = [
    (name, f"layout={{tensor: {tensor}, pipeline: {pipeline}, {ALIKE}}}", f"training.sequence_length={length}")
    for name, tensor, pipeline in (
        ("llama3-8b", 2, 1),
        ("llama3-8b", 8, 2),
        ("llama3-70b", 8, 4),
        ("mixtral-8x7b", 2, 4),
    )
    for length in (1024, 2048, 4096)
] + [
    ("llama3-8b", f"layout={{tensor: 4, pipeline: 1, {ALIKE}}}", f"training.sequence_length={n}") for n in (1536, 3072)
]


@cache
def planned(name: str, *overrides: str) -> tuple[dict[str, Any], Plan]:
    """run.json of a recipe, and its plan."""
    recipe = recipe_of(name, *overrides)
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


ON_X8 = "cluster=h100-80gb-x8"
# Split sequences: the optimizer step is the peak, where a bucket of ZeRO 3 lies too.
SPLIT_SEQUENCES = ("nodes=1", "layout={context: 2, zero_stage: 3, recompute: full, micro_batch_size: 1}")
SCRIPT = "backend={{name: deepspeed, script: /home/me/train.py, script_kind: {}}}"


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("gemma2-9b", ()),
        *in_soak(("deepseek-v3", ())),
        ("llama3.1-70b-lora", ()),
        ("llama2-7b-deepspeed", (ON_X8, *SPLIT_SEQUENCES)),
        ("llama2-7b-deepspeed", (ON_X8, SCRIPT.format("hugging-face"))),
        ("llama2-7b-deepspeed", (ON_X8, SCRIPT.format("own"), "layout={zero_stage: 3, offload_optimizer: 0.5}")),
        ("llama2-7b-deepspeed", (ON_X8, SCRIPT.format("pipeline"), "layout={pipeline: 4, zero_stage: 1}")),
    ],
)
def test_the_records_of_a_run_are_priced_as_its_plan_was(name: str, overrides: tuple[str, ...]) -> None:
    """Otherwise a calibration would learn the difference between two of our own formulas."""
    run, plan = planned(name, *overrides)
    (priced,) = predictions([{**run["measurement"], "id": "run"}])
    assert isinstance(priced, Prediction), priced
    assert (priced.reserved + priced.outside).tolist() == [rank.device_bytes for rank in plan.estimate.ranks]


def test_runs_planned_with_a_calibration_keep_it_right(llmlaunch: CommandLine) -> None:
    """The second round learns from runs whose plans were corrected: records are priced without any correction, so
    nothing is corrected twice."""
    rng = random.Random(5)
    found = [left_behind(rng, number, *planned(*job, ON_X8)) for number, job in enumerate(JOBS)]
    llmlaunch.import_records([record for run in found for record in run])
    (first,) = llmlaunch.json("calibrate")["answers"]
    again = [left_behind(rng, 100 + number, *planned(*job, ON_X8)) for number, job in enumerate(JOBS)]
    llmlaunch.import_records(
        [{**record, "calibration_id": first["calibration"]["id"]} for run in again for record in run]
    )
    (second,) = llmlaunch.json("calibrate")["answers"]
    assert second["did"] == "taken", second["why"]
    for name, size in (("torch_share", 0.006), ("outside_bytes", 0.15 * GIB)):
        old, new = (answer["calibration"]["correction"][name] for answer in (first, second))
        assert new == pytest.approx(old, abs=size)
