"""Weights & Biases, written offline by the example and read back by its own schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from example_scripts import run_example

from llmlaunch.store.database import Store
from support.collected_runs import GIB, RUN_ID, exported, finished, written
from support.wandb_files import read_back

KEY = "0123456789abcdef0123456789abcdef01234567"


def test_a_run_is_written_once_anew_where_it_grew_and_beside_its_own_once_it_has_ended(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two runs the training of one writes to W&B itself (tracking.wandb), which gets its figures there."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    folder = tmp_path / "wandb-runs"
    directory = finished(tmp_path / "run")
    (other,) = exported(store, finished(tmp_path / "other", run_id="other"))
    own = {**json.loads(other), "wandb": {"id": "my-run-1", "project": "ours", "entity": "us", "name": "shown"}}
    tracked = {state: json.dumps({**own, "state": state, "cause": "oom"}) + "\n" for state in ("running", "failed")}

    def written_runs() -> list[dict[str, Any]]:
        return [read_back(path) for path in (folder / "wandb").glob("offline-run-*")]

    lines = [*exported(store, directory), tracked["running"]]
    run_example("to_wandb", lines, folder)
    run_example("to_wandb", lines, folder)
    (contents,) = written_runs()
    assert (contents["id"], contents["project"], contents["name"], contents["exit"]) == (RUN_ID, "llmlaunch", RUN_ID, 0)
    assert contents["config"]["layout.pipeline"] == 2
    assert contents["summary"]["peak_bytes/device/stage1"] == 30 * GIB
    assert contents["summary"]["predicted_bytes/device/stage1"] == 11 * GIB
    assert contents["summary"]["state"] == "succeeded"

    written(directory, (20, 35))
    run_example("to_wandb", [*exported(store, directory), tracked["failed"]], folder)
    everything = written_runs()
    ours = [run for run in everything if run["id"] == RUN_ID]
    assert {run["summary"]["peak_bytes/worst"] for run in ours} == {30 * GIB, 35 * GIB}
    (theirs,) = [run for run in everything if run["id"] != RUN_ID]
    assert (theirs["id"], theirs["project"], theirs["name"]) == ("my-run-1", "ours", "shown")
    assert theirs["summary"]["cause"] == "oom"
    assert theirs["summary"]["peak_bytes/device/stage1"] == 30 * GIB
    assert not any(KEY.encode() in path.read_bytes() for path in folder.rglob("*") if path.is_file())
