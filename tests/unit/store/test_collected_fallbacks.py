"""Every attempt is compared with the layout it ran, and a run that goes on is not over."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from llmlaunch.store.collect import collect
from llmlaunch.store.database import Store
from llmlaunch.store.measurements import contents
from llmlaunch.store.runs import list_runs, set_state
from support.store_run_dirs import GIB, fallback_chain


def records(store: Store) -> list[dict[str, Any]]:
    return [json.loads(content) for content in contents(store)]


def test_each_attempt_is_compared_with_the_layout_it_ran(store: Store, tmp_path: Path) -> None:
    collect(store, [fallback_chain(tmp_path / "run").path])
    found = [
        (r["attempt"], r["pipeline_rank"], r["predicted_bytes"] // GIB, r["run_state"], r.get("micro_batch_size"))
        for r in records(store)
    ]
    assert found == [
        ("77.0", 0, 10, "failed", None),
        ("77.0", 1, 11, "failed", None),
        ("77.1", 0, 8, "succeeded", 1),
        ("77.1", 0, 8, "succeeded", 1),
    ]


def test_the_run_is_shown_with_what_its_last_layout_needed(store: Store, tmp_path: Path) -> None:
    collect(store, [fallback_chain(tmp_path / "run").path])
    (run,) = list_runs(store)
    assert (run.state, run.attempt, run.predicted_bytes, run.measured_bytes) == ("succeeded", "77.1", 8 * GIB, 9 * GIB)


def test_a_layout_that_cannot_be_read_lends_nobody_its_prediction(store: Store, tmp_path: Path) -> None:
    run = fallback_chain(tmp_path / "run")
    (run.path / "fallback" / "1" / "run.json").write_text("{")
    (outcome,) = collect(store, [run.path])
    assert [r["attempt"] for r in records(store)] == ["77.0", "77.0"]
    assert "attempt 77.1 ran another layout, whose run.json cannot be read" in str(outcome.reason)


def test_a_layout_out_of_the_run_directory_is_not_followed(store: Store, tmp_path: Path) -> None:
    run = fallback_chain(tmp_path / "run")
    run.write("attempts/77.1/attempt.json", {"layout": "../other"})
    (outcome,) = collect(store, [run.path])
    assert "which is no fallback/NUMBER" in str(outcome.reason)
    assert [r["attempt"] for r in records(store)] == ["77.0", "77.0"]


def test_between_two_layouts_the_run_goes_on(store: Store, tmp_path: Path) -> None:
    run = fallback_chain(tmp_path / "run")
    verdict = (run.path / "attempts" / "77.0" / "status.json").read_text()
    (run.path / "status.json").write_text(verdict)
    shutil.rmtree(run.path / "attempts" / "77.1")
    (outcome,) = collect(store, [run.path])
    assert outcome.state == "running"
    set_state(store, str(outcome.run_id), "cancelled")
    (outcome,) = collect(store, [run.path])
    assert outcome.state == "cancelled"
