"""The end of a run in words: how far it got, predicted beside measured, where checkpoints lie, and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from llmlaunch.report.outcome_text import outcome_lines, peaks_text
from llmlaunch.units import GIB

PLAN: dict[str, Any] = {
    "step_seconds": 2.0,
    "tokens_per_second_per_gpu": 1000.0,
    "memory": {"peak_kind": "device", "limit_bytes": 70 * GIB},
}
RUN: dict[str, Any] = {"progress": {"steps": 100, "tokens_per_step": 4000}, "checkpoint": {"path": "/ckpt"}}
STATUS: dict[str, Any] = {"step": 100, "saved_step": 90, "restarts": 1}


def record(rank: int, peak_gib: float, **more: Any) -> dict[str, Any]:
    return {
        "attempt": "7.0", "started_at": 1.0, "peak_kind": "device", "peak_bytes": int(peak_gib * GIB),
        "predicted_bytes": 60 * GIB, "global_rank": rank, "pipeline_rank": rank, "node": "n1", "world_size": 2,
        "step_seconds": 2.5, **more,
    }  # fmt: skip


def test_steps_time_rate_and_the_fullest_rank_stand_beside_their_predictions() -> None:
    lines = "\n".join(outcome_lines(PLAN, RUN, STATUS, [record(0, 50), record(1, 64)])).splitlines()
    assert lines[:2] == ["Steps: 100 of 100, 1 restart", "Checkpoints: /ckpt, the last of step 90"]
    cells = {line[:30].strip(): line[30:].split() for line in lines[3:] if line.strip()}
    assert cells["seconds per step"] == ["2", "2.5", "-20.0", "%"]
    assert cells["tokens/s per device"] == ["1,000", "800", "+25.0", "%"]
    assert cells["GiB, fullest rank (device)"] == ["60.0", "64.0", "-6.2", "%", "limit", "70.0"]
    assert max(map(len, lines)) <= 80


def test_the_attempt_that_began_last_is_what_counts() -> None:
    earlier = record(0, 69, attempt="7.0", started_at=1.0, step_seconds=9.0)
    text = "\n".join(outcome_lines(PLAN, RUN, STATUS, [earlier, record(0, 50, attempt="7.1", started_at=2.0)]))
    assert "50.0" in text
    assert "69.0" not in text


@pytest.mark.parametrize(
    ("run", "status", "said"),
    [
        ({}, {}, ["Steps: none on record", "Checkpoints: none, the recipe names no folder for them"]),
        (RUN, {"step": 3, "saved_step": 0}, ["Steps: 3 of 100", "Checkpoints: /ckpt, none was saved yet"]),
        ({"progress": 7, "checkpoint": "torn"}, {"step": "x"}, ["Steps: none on record", "Checkpoints: none"]),
    ],
)
def test_what_is_missing_or_torn_is_left_out(run: dict[str, Any], status: dict[str, Any], said: list[str]) -> None:
    lines = outcome_lines({}, run, status, [])
    assert len(lines) == 2
    assert all(line.startswith(start) for line, start in zip(lines, said, strict=True))


def test_a_run_without_a_prediction_shows_what_was_measured() -> None:
    text = "\n".join(outcome_lines({}, RUN, STATUS, [record(0, 50, predicted_bytes=None)]))
    assert [line.split()[-3:] for line in text.splitlines() if "seconds per step" in line] == [["-", "2.5", "-"]]


def test_what_was_held_before_the_first_step_is_not_compared() -> None:
    early = [record(0, 3, step_seconds=None)]
    text = "\n".join([*outcome_lines(PLAN, RUN, {}, early, ["7.0"]), peaks_text(early, "device", ["7.0"])])
    assert "%" not in text
    assert "60.0" not in text
    assert "3.0" in text
    assert text.count("it is no peak to compare") == 1


def test_many_ranks_do_not_push_the_summary_off_the_screen_and_the_fullest_come_first() -> None:
    records = [record(rank, 40 + rank) for rank in range(20)]
    lines = peaks_text([record(0, 99, peak_kind="host", global_rank=None), *records], "device").splitlines()
    assert len(lines) <= 9
    assert lines[2].startswith("  rank 19 on n1 (stage 19)")
    assert lines[-1] == "  and 15 more"
