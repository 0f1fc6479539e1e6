"""Weights & Biases, written offline by its process and read back by its own schema."""

from __future__ import annotations

from pathlib import Path

import pytest
from collected_runs import GIB, RUN_ID, collected, finished, written
from wandb_files import read_back

from llmlaunch.sinks.delivery import chosen_sinks, pass_on
from llmlaunch.store.database import Store

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
