"""A job that ran before is judged by what it was measured to need, from its first run on; one that ran out of memory is
not called safe again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.app.planned_run import PlannedRun, plan
from llmlaunch.assets import asset
from llmlaunch.rendering.run_json import measurement_template
from llmlaunch.store.database import open_store
from llmlaunch.store.measurements import put_collected
from llmlaunch.store.runs import put_plan, put_recipe, put_runs
from llmlaunch.units import GIB
from support.command_line import CommandLine
from support.json_schemas import validate

RECIPE = str(asset("recipes", "llama3-8b.yaml"))
LAYOUT = (
    "layout={tensor: 2, pipeline: 1, context: 1, micro_batch_size: 1, sequence_parallel: true, zero_stage: 1, "
    "recompute: none, offload_modules: [], offload_layers: 0, offload_optimizer: 0, techniques: asked}"
)
FREE = LAYOUT.replace("tensor: 2", "tensor: [2, 4]")
NEAR = "memory.limit=0.66"  # 2.9 GiB more than is predicted: what an argument takes could matter
UNKNOWN = ("backend={name: megatron-lm, extra_args: [--log-params-norm]}", NEAR)
SCHEMA = json.loads((Path(__file__).resolve().parents[3] / "docs" / "schemas" / "plan.schema.json").read_text())
MESSAGE = {"total_bytes": 79 * GIB, "process_bytes": 79 * GIB}


def ran(
    run: PlannedRun,
    peak_bytes: int | None,
    steps: int = 100,
    ranks: int | None = None,
    training: Mapping[str, Any] = {},
    run_id: str = "r1",
    **changes: Any,
) -> None:
    """Store a run of a plan: each rank's device peak, or None where it ran out of memory. `training` are changes of
    what its recipe trains."""
    state = "failed" if peak_bytes is None else "succeeded"
    template: Any = measurement_template(run.recipe, run.plan)
    template["recipe"]["training"] |= training
    common = {
        "schema": 1, "run_id": run_id, "attempt": "1", "run_state": state, "started_at": 1_760_000_000.0, "node": "n0",
    }  # fmt: skip
    records = [
        {
            **template, **common, "id": f"{run_id}/1/rank{rank}", "global_rank": rank, "pipeline_rank": 0,
            "peak_kind": "oom" if peak_bytes is None else "device", "peak_bytes": peak_bytes,
            "observed": {"steps_run": steps}, "numbers": MESSAGE, **changes,
        }
        for rank in range(run.layout.world_size if ranks is None else ranks)
    ]  # fmt: skip
    recipe = run.recipe
    with open_store() as store, store.write() as connection:
        recipe_id = put_recipe(connection, recipe.name, recipe.digest, recipe.text, recipe.overrides)
        row = {"directory": "/nowhere", "recipe_id": recipe_id, "state": state}
        put_runs(connection, {run_id: {**row, "plan_id": put_plan(connection, recipe_id, json.dumps(run.json))}})
        put_collected(connection, records)


@pytest.fixture(autouse=True)
def megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_LM_PATH", str(tmp_path))


@pytest.fixture(scope="module")
def planned() -> PlannedRun:
    return plan(RECIPE, [LAYOUT])


def checked(llmlaunch: CommandLine, *overrides: str, code: int = 0) -> dict[str, Any]:
    answer: dict[str, Any] = llmlaunch.json("check", RECIPE, LAYOUT, *overrides, code=code)
    validate({name: value for name, value in answer.items() if name != "hints"}, SCHEMA)
    return answer


def test_the_next_check_of_the_same_job_says_what_was_measured(llmlaunch: CommandLine, planned: PlannedRun) -> None:
    assert checked(llmlaunch)["memory"]["rehearsed"] is None
    ran(planned, 60 * GIB)
    rehearsed = checked(llmlaunch)["memory"]["rehearsed"]
    assert (rehearsed["verdict"], rehearsed["device_bytes"]) == ("safe", 60 * GIB)
    assert rehearsed["ranks"][0]["on"] == "run"
    text = " ".join(llmlaunch("check", RECIPE, LAYOUT).stdout.split())
    assert "this very job ran 2025-10-09" in text
    assert f"60.00 GiB device on its worst rank, {planned.plan.estimate.worst.device_bytes / GIB:.2f} predicted" in text


def test_one_that_ran_is_safe_where_its_estimate_alone_is_not(llmlaunch: CommandLine) -> None:
    large = (RECIPE, LAYOUT.replace("size: 1", "size: 4"))
    assert llmlaunch.json("check", *large, code=3)["verdict"] == "unsafe"
    ran(plan(large[0], [large[1]]), 70 * GIB)
    answer = llmlaunch.json("check", *large)
    assert (answer["verdict"], answer["memory"]["rehearsed"]["device_bytes"]) == ("safe", 70 * GIB)


def test_one_that_ran_out_of_memory_is_never_safe(llmlaunch: CommandLine, planned: PlannedRun) -> None:
    assert planned.plan.safe
    ran(planned, None)
    answer = checked(llmlaunch, code=3)
    assert answer["verdict"] == "unsafe"
    assert "it ran out of memory" in llmlaunch("check", RECIPE, LAYOUT, code=3).stderr
    # where the layout is free, another one is chosen
    free = llmlaunch.json("check", RECIPE, FREE)
    assert free["layout"] != answer["layout"]


def test_a_run_of_another_job_says_nothing(llmlaunch: CommandLine, planned: PlannedRun) -> None:
    """Too short, without a rank, of another batch, version, format or card, cancelled, and no record of ours."""
    others: list[dict[str, Any]] = [
        {"steps": 1}, {"ranks": 31}, {"training": {"global_batch_size": 256}}, {"backend_version": "0.16.1"},
        {"training": {"precision": "fp32"}}, {"gpu_memory_bytes": 94 * GIB}, {"run_state": "cancelled"},
        {"recipe": None},
    ]  # fmt: skip
    for number, other in enumerate(others):
        ran(planned, 60 * GIB, run_id=f"r{number}", **other)
    assert checked(llmlaunch)["memory"]["rehearsed"] is None


def test_an_argument_that_nobody_can_price_is_part_of_the_job(llmlaunch: CommandLine) -> None:
    """A run with it answers for it, and a run without it tells nothing of a job with it."""
    assert checked(llmlaunch, *UNKNOWN, code=3)["verdict"] == "tight"
    ran(plan(RECIPE, [LAYOUT, *UNKNOWN]), 50 * GIB)
    assert checked(llmlaunch, *UNKNOWN)["verdict"] == "safe"
    assert checked(llmlaunch, NEAR)["memory"]["rehearsed"] is None
    assert checked(llmlaunch)["memory"]["rehearsed"] is None


def test_a_run_without_an_unknown_argument_does_not_answer_for_it(llmlaunch: CommandLine, planned: PlannedRun) -> None:
    ran(planned, 50 * GIB)
    assert checked(llmlaunch, NEAR)["memory"]["rehearsed"]["verdict"] == "safe"
    answer = checked(llmlaunch, *UNKNOWN, code=3)
    assert (answer["verdict"], answer["memory"]["rehearsed"]) == ("tight", None)
