"""From recipe to recipe: plans, what their runs leave behind on a site that is off by a hidden bias, `calibrate`, and
what `check` predicts then."""

from __future__ import annotations

import random
from typing import Any

import pytest
from calibrating import BIAS, RECIPE, Cli

from llmlaunch.assets import asset
from llmlaunch.backends.registry import backend_for
from llmlaunch.calibration.cases import Prediction, predict
from llmlaunch.planner.plan import Plan, as_planned
from llmlaunch.planner.setting import setting_of
from llmlaunch.planner.sizing import make_sized_plan
from llmlaunch.recipe.load import load_recipe
from llmlaunch.rendering.run_json import run_description
from llmlaunch.rundir.summary import AttemptSummary, RankSummary
from llmlaunch.store.run_records import records_of
from support.hidden_bias import GIB

PINNED = "layout={tensor: 4, pipeline: 2, context: 1, micro_batch_size: 1, recompute: none, virtual_pipeline: 1}"
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
