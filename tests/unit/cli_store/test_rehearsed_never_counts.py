"""What was rehearsed speaks for its own shape: nothing that learns from runs takes it for one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from calibrating import BIAS, RECIPE, Cli

from llmlaunch.calibration.learning import scores_of_records
from llmlaunch.calibration.pool import gather
from llmlaunch.calibration.records import clusters_by_gpu, exclusion_reason
from support.hidden_bias import runs
from support.rehearsed_plans import PINS, on_gpu, planned, records, traced

MANY = [(*PINS, f"training.sequence_length={1024 * n}") for n in range(1, 13)]


def rehearsed() -> list[dict[str, Any]]:
    """A dozen shapes, rehearsed at twice of what is predicted, some of them until they ran out of memory."""
    found = []
    for number, words in enumerate(MANY):
        one = planned(*words)
        ranks = [traced(one, 0, 2.0), on_gpu(one, 1, 2.0), on_gpu(one, 0, 2.0, ran_out=number % 3 == 0)]
        found += records(one, *ranks)
    return found


@pytest.fixture(scope="module")
def kept() -> list[dict[str, Any]]:
    return rehearsed()


def test_no_reader_takes_one_for_a_run(kept: list[dict[str, Any]]) -> None:
    assert {exclusion_reason(record) for record in kept} == {"rehearsed"}
    assert gather(kept).configurations == []
    assert gather(kept).left_out == {"rehearsed": len(kept)}
    assert scores_of_records(kept, clusters_by_gpu(), "megatron", "h100-80gb") == []


def test_a_full_card_of_one_is_no_death_either(kept: list[dict[str, Any]]) -> None:
    """Not even with the words of a cluster run that filled its card and failed."""
    record = {**kept[-1], "run_state": "failed", "peak_bytes": kept[-1]["gpu_memory_bytes"]}
    assert exclusion_reason(record) == "rehearsed"


def test_a_store_full_of_them_calibrates_as_an_empty_one(cli: Cli, kept: list[dict[str, Any]]) -> None:
    cli.imports("rehearsed", kept)
    said = cli.said("calibrate")
    assert said["answers"] == []
    assert said["left_out"] == {"rehearsed": len(kept)}


def test_a_calibration_and_a_margin_are_the_same_with_them_and_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kept: list[dict[str, Any]]
) -> None:
    """A plan at a risk, before anything is learned from 30 runs (then they bound it themselves) and after."""
    told = []
    for name, more in (("without", []), ("with", kept)):
        (tmp_path / name).mkdir()
        cli = Cli(tmp_path / name, capsys, monkeypatch)
        cli.imports("all", [*more, *[record for run in runs(1, BIAS, 30) for record in run]])
        before = cli.said("check", RECIPE, "memory.risk=0.1")
        (answer,) = cli.said("calibrate")["answers"]
        learned = {key: value for key, value in answer["calibration"].items() if key not in ("id", "made_at")}
        after = cli.said("check", RECIPE, "memory.risk=0.1")
        told.append((before["memory"], learned, _unnamed(after["memory"])))
    assert told[0] == told[1]
    assert told[0][0]["runs"] == 30


def _unnamed(memory: dict[str, Any]) -> dict[str, Any]:
    """A calibration is called after the second it was made in."""
    learned = {name: value for name, value in memory["correction"].items() if name != "calibration_id"}
    text = {name: value for name, value in memory.items() if name not in ("evidence", "margin")}
    return text | {"correction": learned}
