"""The figures of a run, from what the store holds of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmlaunch.node.node_environment import export_tracking
from llmlaunch.store.database import Store
from llmlaunch.store.history import stored_run
from llmlaunch.store.run_figures import figures_of
from support.collected_runs import GIB, RUN_ID, STARTED, exported, finished
from support.command_line import CommandLine

DOCS = Path(__file__).parents[3] / "docs" / "export.md"


def test_figures_are_predicted_and_measured_by_stage_and_what_was_run(store: Store, tmp_path: Path) -> None:
    (line,) = exported(store, finished(tmp_path / "run"))
    figures = json.loads(line)
    assert (figures["run_id"], figures["recipe"], figures["attempt"]) == (RUN_ID, "tiny", "77.0")
    assert (figures["state"], figures["cause"], figures["wandb"]) == ("succeeded", None, None)
    assert (figures["began"], figures["ended"]) == (STARTED, STARTED + 101)
    settings, numbers = figures["settings"], figures["numbers"]
    assert settings["layout.pipeline"] == 2
    assert settings["layout.layers_by_stage"] == "1,1"
    assert (settings["recipe"], settings["gpu"], settings["world_size"]) == ("tiny", "H100", 2)
    gib = {name: value / GIB for name, value in numbers.items() if "bytes" in name}
    assert gib["predicted_bytes/device/stage1"] == 11
    assert (gib["peak_bytes/device/stage0"], gib["peak_bytes/device/stage1"]) == (20, 30)
    assert (gib["peak_bytes/worst"], gib["limit_bytes"], gib["peak_bytes/host"]) == (30, 64, 9)
    assert (numbers["step_seconds"], numbers["predicted_step_seconds"], numbers["tokens_per_second"]) == (2, 2.5, 800)
    assert [
        (peak["rank"], peak["gpu_uuid"], peak["source"]) for peak in figures["peaks"] if peak["kind"] == "device"
    ] == [(0, "GPU-n0-0", "nvml process"), (1, "GPU-n0-1", "nvml process")]


def test_a_run_that_left_no_peak_has_a_plan_and_a_state(store: Store, tmp_path: Path) -> None:
    run = finished(tmp_path / "run", state="failed", exit_code=1)
    for path in (run.path / "peaks").glob("*"):
        path.unlink()
    figures = json.loads(exported(store, run)[0])
    assert figures["state"] == "failed"
    assert [peak for peak in figures["peaks"] if peak["kind"] == "device"] == []
    assert figures["numbers"]["predicted_bytes/device/stage0"] == 10 * GIB
    assert "peak_bytes/worst" not in figures["numbers"]


def test_a_run_that_the_training_itself_writes_to_wandb_is_named_as_there(store: Store, tmp_path: Path) -> None:
    run_id = "my.run-20260101T000000Z-0001"
    run = finished(tmp_path / "run", run_id)
    tracked = "tracking: {wandb: {project: ours, entity: us, name: shown}}"
    (run.path / "recipe.yaml").write_text(f"schema: 1\nname: my.run\n{tracked}\n")
    assert json.loads(exported(store, run)[0])["wandb"] == {
        "id": id_on_a_node(run.path, run_id),
        "project": "ours",
        "entity": "us",
        "name": "shown",
    }


def id_on_a_node(run: Path, run_id: str) -> str:
    """The id that a node of the run exports to the trainers."""
    (run / "run.id").write_text(f"{run_id}\n")
    environment: dict[str, str] = {}
    export_tracking(
        {"wandb": {"name": "shown", "save_dir": None}, "workdir": ""}, run, run, environment, lambda task: task()
    )
    return environment["WANDB_RUN_ID"]


def test_every_field_is_documented(store: Store, tmp_path: Path) -> None:
    exported(store, finished(tmp_path / "run"))
    figures = figures_of(stored_run(store, RUN_ID) or {})
    page = DOCS.read_text("utf-8")
    fields = {*figures, *figures["peaks"][0], *(name for name in figures["settings"] if not name.startswith("layout."))}
    fields |= {name for name in figures["numbers"] if "/" not in name}
    assert [name for name in sorted(fields) if f"`{name}`" not in page] == []


def test_the_command_writes_the_runs_that_are_listed(llmlaunch: CommandLine, tmp_path: Path) -> None:
    first, second = finished(tmp_path / "first"), finished(tmp_path / "second", run_id="another")
    llmlaunch("collect", first.path, second.path)
    lines = llmlaunch("runs", "--export", "-").stdout.splitlines()
    assert {json.loads(line)["run_id"] for line in lines} == {RUN_ID, "another"}
    file = tmp_path / "runs.jsonl"
    assert llmlaunch.json("runs", "--export", file, "--limit", "1") == {"exported": 1, "file": str(file)}
    assert file.read_text().splitlines() == lines[:1]
    assert llmlaunch("runs", "--state", "failed", "--export", "-").stdout == ""


@pytest.mark.parametrize(
    ("words", "says"), [(("-", "--json"), "are JSON already"), (("/proc/nowhere/runs.jsonl",), "/proc/nowhere")]
)
def test_what_cannot_be_written_is_a_mistake(
    llmlaunch: CommandLine, tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    llmlaunch("collect", finished(tmp_path / "run").path)
    assert says in llmlaunch("runs", "--export", *words, code=2).stderr
