"""The accuracy report: the text says what the JSON says, and the plot is a picture of the same records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.accuracy.scoring import ScoredRecord, score_all
from llmlaunch.accuracy.summary import SIZES, families
from llmlaunch.calibration.records import Record, read_records
from llmlaunch.cluster.cards import machines
from llmlaunch.report.accuracy_text import accuracy_json, accuracy_text, records_text
from support.json_schemas import validate
from validation.scoring import scores_of

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests" / "data" / "measurements"


GRID = "fujii-grid-A100-40GB"


def public(*families: str) -> list[Record]:
    """Return every tenth public record, and all of these families."""
    records = [record for file in sorted(DATA.glob("*.jsonl")) for record in read_records(file)]
    return [record for place, record in enumerate(records) if place % 10 == 0 or record["family"] in families]


@pytest.fixture(scope="module")
def found() -> list[ScoredRecord]:
    return scores_of(public(GRID), machines())


@pytest.fixture(scope="module")
def answer(found: list[ScoredRecord]) -> dict[str, Any]:
    return accuracy_json(found)


def test_accuracy_has_the_published_shape(answer: dict[str, Any]) -> None:
    shape = json.loads((ROOT / "docs" / "schemas" / "accuracy.schema.json").read_text())
    validate(json.loads(json.dumps(answer)), shape)


def test_public_records_are_priced_but_those_of_trainers_that_nobody_can_launch() -> None:
    scores = score_all(public("bigscience"), machines())
    fork = [scored for scored in scores if scored.record["family"] == "bigscience"]
    assert fork
    assert sum(scored.supported for scored in scores) > (len(scores) - len(fork)) // 2
    assert not any(scored.supported for scored in fork)
    assert {str(scored.reason).partition(" is shown")[0] for scored in fork} == {"backend 'megatron-deepspeed'"}


def test_sizes_hold_each_measured_and_priced_record_once(answer: dict[str, Any]) -> None:
    measured = {record["id"] for record in answer["records"] if record["measured_bytes"] and record["predicted_bytes"]}
    assert sum(row["records"] for row in answer["sizes"]) == len(measured)
    large = {(row["backend"], row["peak_kind"]): row for row in answer["sizes"] if row["size"] == "above_40_gib"}
    assert large["megatron", "allocated"]["mape"] < 0.03
    sizes = [row["size"] for row in answer["sizes"]]
    assert sizes == sorted(sizes, key=[*SIZES].index)
    worst = answer["underestimates"]
    assert [row["error"] for row in worst] == sorted(row["error"] for row in worst)
    assert all(row["measured_bytes"] >= 8 * 2**30 for row in worst)


def test_runs_whose_flags_nobody_knows_are_never_refusals(found: list[ScoredRecord]) -> None:
    grid = [one for one in found if one.record["family"] == GRID and one.record["peak_kind"] == "fits"]
    known = families(grid)[f"{GRID}/fits"]
    unknown = families([replace(o, record={**o.record, "flags_known": False}) for o in grid])
    assert known["called_safe"] + known["called_tight"] + known["called_unsafe"] == len(grid)
    assert unknown[f"{GRID}/fits"]["called_unsafe"] == 0
    assert unknown[f"{GRID}/fits"]["flags_unknown"] == len(grid)


def test_the_text_says_all_that_the_json_says(answer: dict[str, Any]) -> None:
    text = accuracy_text(answer)
    for name in answer["families"]:
        assert name in text
    for part in ("worst record", "Not supported"):
        assert part in text
    lines = records_text(answer).splitlines()
    assert len(lines) == 2 + len(answer["records"])


def test_a_row_of_errors_stays_a_line_on_a_narrow_screen(
    answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    _, head, *rows = accuracy_text(answer).split("\n\n")[0].splitlines()
    assert head.split()[-1] == "worst"
    assert len(rows) == len(answer["sizes"])
    assert all(len(row) <= 100 for row in rows)
    monkeypatch.setenv("COLUMNS", "300")
    assert accuracy_text(answer).splitlines()[1].endswith("worst record")


def test_a_name_in_a_file_cannot_steer_the_terminal(answer: dict[str, Any]) -> None:
    evil = json.loads(json.dumps(answer).replace("SimuMax", "Simu\\u001b[2JMax"))
    for text in (accuracy_text(evil), records_text(evil)):
        assert "SimuMax" in text
        assert "\x1b" not in text
