"""What sinks say of a run, from what the store holds of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from collected_runs import GIB, RUN_ID, STARTED, collected, finished, written

from llmlaunch.sinks.figures import figures_of
from llmlaunch.store.database import Store
from llmlaunch.store.history import run_marks, stored_run


def test_figures_are_predicted_and_measured_by_stage_and_what_was_run(store: Store, tmp_path: Path) -> None:
    collected(store, finished(tmp_path / "run"))
    run = stored_run(store, RUN_ID)
    assert run is not None
    figures = figures_of(run)
    assert (figures.run_id, figures.recipe, figures.attempt, figures.state) == (RUN_ID, "tiny", "77.0", "succeeded")
    assert (figures.began, figures.ended) == (STARTED, STARTED + 101)
    assert figures.settings["layout.pipeline"] == 2
    assert figures.settings["layout.layers_by_stage"] == "1,1"
    assert (figures.settings["recipe"], figures.settings["gpu"], figures.settings["world_size"]) == ("tiny", "H100", 2)
    numbers = {name: value / GIB for name, value in figures.numbers.items() if "bytes" in name}
    assert numbers["predicted_bytes/device/stage1"] == 11
    assert (numbers["peak_bytes/device/stage0"], numbers["peak_bytes/device/stage1"]) == (20, 30)
    assert (numbers["peak_bytes/worst"], numbers["limit_bytes"], numbers["peak_bytes/host"]) == (30, 64, 9)
    assert (figures.numbers["step_seconds"], figures.numbers["tokens_per_second"]) == (2.0, 800.0)
    assert figures.numbers["predicted_step_seconds"] == 2.5
    assert [(peak.rank, peak.gpu_uuid, peak.source) for peak in figures.of_kind("device")] == [
        (0, "GPU-n0-0", "nvml process"),
        (1, "GPU-n0-1", "nvml process"),
    ]


@pytest.mark.parametrize("ended", [True, False])
def test_the_mark_changes_with_what_the_store_holds_and_with_nothing_else(
    store: Store, tmp_path: Path, ended: bool
) -> None:
    run = finished(tmp_path / "run")
    if not ended:
        (run.path / "status.json").unlink()
    collected(store, run)
    (first,) = run_marks(store)
    assert first.run_id == RUN_ID
    assert run_marks(store) == [first]
    written(run, (40, 30))
    collected(store, run)
    assert run_marks(store)[0].mark != first.mark


def test_a_run_that_left_no_peak_has_a_plan_and_a_state(store: Store, tmp_path: Path) -> None:
    run = finished(tmp_path / "run", state="failed", exit_code=1)
    for path in (run.path / "peaks").glob("*"):
        path.unlink()
    collected(store, run)
    figures = figures_of(stored_run(store, RUN_ID) or {})
    assert figures.state == "failed"
    assert figures.of_kind("device") == []
    assert figures.numbers["predicted_bytes/device/stage0"] == 10 * GIB
    assert "peak_bytes/worst" not in figures.numbers
