"""`accuracy` without a file scores what the store holds: the runs of whoever asks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmlaunch.assets import asset
from support.command_line import CommandLine
from support.json_schemas import validate
from support.store_run_dirs import ATTEMPT, STARTED, RunDir

SCHEMA = json.loads((Path(__file__).resolve().parents[3] / "docs" / "schemas" / "accuracy.schema.json").read_text())


@pytest.fixture
def trained(tmp_path: Path, llmlaunch: CommandLine) -> RunDir:
    """The quickstart after its run: two processes, each a tenth above its prediction."""
    llmlaunch("render", asset("recipes", "quickstart.yaml"), "-o", tmp_path / "run")
    run = RunDir.rendered(tmp_path / "run", devices=2)
    (run.path / "run.id").write_text("mine-1\n")
    (predicted,) = run.run["predicted_bytes"]
    run.ranks(ended_at=STARTED + 9, resident_peak_bytes=int(1.1 * predicted))
    run.write(f"attempts/{ATTEMPT}/progress.json", {"step": 40, "steps": 40, "step_seconds": 1.5})
    run.line("n0", host={"used_peak_bytes": 4 * predicted, "total_bytes": 2**34})
    run.status()
    llmlaunch("collect", run.path)
    return run


def test_the_stores_own_runs_are_scored_resident_against_resident(llmlaunch: CommandLine, trained: RunDir) -> None:
    answer = llmlaunch.json("accuracy")
    validate(answer, SCHEMA)
    scored = [record for record in answer["records"] if record["peak_kind"] == "resident"]
    assert [record["predicted_bytes"] for record in scored] == trained.run["predicted_bytes"] * 2
    assert all(record["verdict"] == "safe" and record["predicted_step_seconds"] for record in scored)
    assert "baseline_bytes" not in scored[0]["assumed"]
    assert answer["families"]["llmlaunch/resident"]["bias"] == pytest.approx(1 / 1.1 - 1, abs=0.001)
    assert answer["families"]["llmlaunch/host"]["supported"] == 1
    assert "llmlaunch/resident" in llmlaunch("accuracy").stdout
    llmlaunch.import_records([{"id": "a note of mine"}])
    with_note, err = llmlaunch("accuracy", "--json")
    assert len(json.loads(with_note)["records"]) == 3
    assert "1 object of the store left out" in err


def test_without_measurements_the_command_says_how_to_get_some(llmlaunch: CommandLine, store_file: Path) -> None:
    answer, err = llmlaunch("accuracy", "--json")
    validate(json.loads(answer), SCHEMA)
    assert "no measurements in the store yet; give a FILE" in err
    assert not store_file.exists()
