"""Weights & Biases, written offline by its process and read back by its own schema."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from collected_runs import GIB, RUN_ID, STARTED, collected, finished, written

from llmlaunch.assets import asset
from llmlaunch.sinks.delivery import chosen_sinks, pass_on
from llmlaunch.sinks.figures import figures_of
from llmlaunch.sinks.to_wandb import Wandb
from llmlaunch.store.database import Store
from llmlaunch.store.history import stored_run
from support.wandb_files import read_back

KEY = "0123456789abcdef0123456789abcdef01234567"


def test_a_run_is_one_offline_run_and_what_grew_takes_its_place(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    folder = tmp_path / "wandb-runs"
    directory = finished(tmp_path / "run")
    collected(store, directory)

    def send() -> int:
        (passed,) = pass_on(store, chosen_sinks([f"wandb={folder}"]))
        assert passed.why is None, passed
        return passed.sent

    def written_runs() -> list[Path]:
        return sorted((folder / "wandb").glob("offline-run-*"))

    assert (send(), send()) == (1, 0)
    (first,) = written_runs()
    contents = read_back(first)
    assert (contents["id"], contents["project"], contents["name"], contents["exit"]) == (RUN_ID, "llmlaunch", RUN_ID, 0)
    assert contents["config"]["layout.pipeline"] == 2
    assert contents["summary"]["peak_bytes/device/stage1"] == 30 * GIB
    assert contents["summary"]["predicted_bytes/device/stage1"] == 11 * GIB
    assert contents["summary"]["state"] == "succeeded"

    written(directory, (20, 35))
    collected(store, directory)
    assert send() == 1
    (second,) = written_runs()
    assert read_back(second)["summary"]["peak_bytes/worst"] == 35 * GIB

    (second / f"run-{RUN_ID}.wandb.synced").touch()  # as `wandb sync` leaves it
    written(directory, (20, 36))
    collected(store, directory)
    assert send() == 1
    assert len(written_runs()) == 2
    assert {read_back(path)["id"] for path in written_runs()} == {RUN_ID}

    everything = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert KEY.encode() not in everything


def test_the_figures_of_a_tracked_run_are_written_on_the_run_that_the_training_writes(
    store: Store, tmp_path: Path
) -> None:
    folder, run_id = tmp_path / "wandb-runs", "my.run-20260101T000000Z-0001"
    directory = finished(tmp_path / "run", run_id, state="failed", exit_code=1)
    directory.ranks(exit_code=1)
    cause = {"schema": 1, "kind": "oom", "node": "n0", "rank": 1, "line": "out of memory", "numbers": {}, "at": STARTED}
    directory.write("attempts/77.0/status.json", {"state": "failed", "exit_code": 1, "cause": cause})
    tracked = "tracking: {wandb: {project: ours, entity: us, name: shown}}"
    (directory.path / "recipe.yaml").write_text(f"schema: 1\nname: my.run\n{tracked}\n")

    collected(store, directory)
    (passed,) = pass_on(store, chosen_sinks([f"wandb={folder}"]))
    assert (passed.why, passed.sent) == (None, 1)
    (written_run,) = (folder / "wandb").glob("offline-run-*")
    contents = read_back(written_run)
    assert (contents["id"], contents["project"], contents["name"]) == (id_in_train_script(run_id), "ours", "shown")
    assert contents["summary"]["cause"] == "oom"
    assert contents["summary"]["peak_bytes/device/stage1"] == 30 * GIB


def test_while_a_tracked_run_trains_nothing_is_written_on_it(store: Store, tmp_path: Path) -> None:
    collected(store, finished(tmp_path / "run"))
    stored = stored_run(store, RUN_ID)
    assert stored is not None
    running = figures_of({**stored, "state": "running", "tracking": {"project": "ours"}})
    sink = Wandb(str(tmp_path / "wandb-runs"))
    sink.send(running, "m1")
    assert not list(tmp_path.rglob("offline-run-*"))
    assert (sink.due({RUN_ID: "m1"}), sink.due({RUN_ID: "m2"})) == ([], [RUN_ID])


def id_in_train_script(run_id: str) -> str:
    """The id that train.sh exports, by bash itself."""
    template = asset("templates", "train.sh.j2").read_text("utf-8")
    (line,) = (line for line in template.splitlines() if line.startswith("export WANDB_RUN_ID="))
    script = f'run_id=$1; {line}; printf %s "$WANDB_RUN_ID"'
    return subprocess.run(["bash", "-uc", script, "bash", run_id], capture_output=True, text=True, check=True).stdout
