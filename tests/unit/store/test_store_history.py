"""What a recipe used when it last ran."""

from __future__ import annotations

from pathlib import Path

from llmlaunch.store.collect import collect
from llmlaunch.store.database import Store
from llmlaunch.store.history import last_true_peaks
from support.store_run_dirs import GIB, STARTED, RunDir


def ran(
    store: Store, path: Path, run_id: str, digest: str, started_at: float, peak: int, state: str = "succeeded"
) -> None:
    run = RunDir(path / run_id, run_id=run_id, pipeline=2)
    run.run["recipe_digest"] = digest
    run.write("run.json", run.run)
    run.rank(0, started_at=started_at, resident_peak_bytes=peak * GIB)
    run.rank(1, started_at=started_at, resident_peak_bytes=(peak - 1) * GIB)
    run.status(state=state, exit_code=0 if state == "succeeded" else 1)
    collect(store, [run.path])


def test_a_recipe_that_never_ran_has_no_past(store: Store) -> None:
    assert last_true_peaks(store, "d1", "tiny") is None


def test_the_newest_run_of_the_recipe_counts(store: Store, tmp_path: Path) -> None:
    ran(store, tmp_path, "b-old", "d1", STARTED, peak=3)
    ran(store, tmp_path, "a-new", "d1", STARTED + 1000, peak=5)
    past = last_true_peaks(store, "d1", "tiny")
    assert past is not None
    assert (past.run_id, past.same_recipe, past.started_at) == ("a-new", True, STARTED + 1000)
    assert [(p.pipeline_rank, p.peak_kind, p.peak_bytes // GIB, p.predicted_bytes) for p in past.peaks] == [
        (0, "resident", 5, 10 * GIB),
        (1, "resident", 4, 11 * GIB),
    ]


def test_a_success_goes_before_a_newer_failure(store: Store, tmp_path: Path) -> None:
    ran(store, tmp_path, "good", "d1", STARTED, peak=5)
    ran(store, tmp_path, "bad", "d1", STARTED + 1000, peak=2, state="failed")
    past = last_true_peaks(store, "d1", "tiny")
    assert past is not None
    assert (past.run_id, past.state) == ("good", "succeeded")


def test_another_content_under_the_name_is_said_to_be_another(store: Store, tmp_path: Path) -> None:
    ran(store, tmp_path, "only", "d1", STARTED, peak=5)
    past = last_true_peaks(store, "d2", "tiny")
    assert past is not None
    assert not past.same_recipe
    assert last_true_peaks(store, "d2", "other") is None
