"""Weights & Biases, written offline by the example and read back by its own schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from example_scripts import run_example

from llmlaunch.store.database import Store
from support.collected_runs import GIB, RUN_ID, exported, finished, written
from support.wandb_files import read_back

KEY = "0123456789abcdef0123456789abcdef01234567"


def test_a_run_is_one_run_of_wandb_and_what_grew_is_written_under_the_same_id(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    folder = tmp_path / "wandb-runs"
    directory = finished(tmp_path / "run")

    def written_runs() -> list[Path]:
        return list((folder / "wandb").glob("offline-run-*"))

    lines = exported(store, directory)
    run_example("to_wandb", lines, folder)
    run_example("to_wandb", lines, folder)
    (first,) = written_runs()
    contents = read_back(first)
    assert (contents["id"], contents["project"], contents["name"], contents["exit"]) == (RUN_ID, "llmlaunch", RUN_ID, 0)
    assert contents["config"]["layout.pipeline"] == 2
    assert contents["summary"]["peak_bytes/device/stage1"] == 30 * GIB
    assert contents["summary"]["predicted_bytes/device/stage1"] == 11 * GIB
    assert contents["summary"]["state"] == "succeeded"

    written(directory, (20, 35))
    run_example("to_wandb", exported(store, directory), folder)
    assert {read_back(path)["id"] for path in written_runs()} == {RUN_ID}
    assert {read_back(path)["summary"]["peak_bytes/worst"] for path in written_runs()} == {30 * GIB, 35 * GIB}

    everything = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert KEY.encode() not in everything


def test_a_run_that_the_training_itself_writes_gets_its_figures_there_once_it_has_ended(
    store: Store, tmp_path: Path
) -> None:
    (line,) = exported(store, finished(tmp_path / "run"))
    own = {"id": "my-run-1", "project": "ours", "entity": "us", "name": "shown"}
    running = {**json.loads(line), "state": "running", "wandb": own}
    run_example("to_wandb", [json.dumps(running)], tmp_path / "wandb-runs")
    assert not list(tmp_path.rglob("offline-run-*"))
    run_example("to_wandb", [json.dumps({**running, "state": "failed", "cause": "oom"})], tmp_path / "wandb-runs")
    (written_run,) = (tmp_path / "wandb-runs" / "wandb").glob("offline-run-*")
    contents = read_back(written_run)
    assert (contents["id"], contents["project"], contents["name"]) == ("my-run-1", "ours", "shown")
    assert contents["summary"]["cause"] == "oom"
    assert contents["summary"]["peak_bytes/device/stage1"] == 30 * GIB
