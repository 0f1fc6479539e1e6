"""Prometheus textfiles, read back as node_exporter reads them."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from collected_runs import GIB, RUN_ID, collected, finished, written
from prometheus_client.parser import text_string_to_metric_families

from llmlaunch.sinks.delivery import chosen_sinks, pass_on
from llmlaunch.sinks.figures import Figures, MeasuredPeak, figures_of
from llmlaunch.sinks.to_prometheus import MOST_PEAKS, MOST_RUNS, Prometheus
from llmlaunch.store.database import Store
from llmlaunch.store.history import stored_run

Series = dict[tuple[str, str], float]


def series(path: Path) -> Series:
    """Value by metric and the labels that tell series of one run apart. No name twice, no times."""
    values: Series = {}
    for family in text_string_to_metric_families(path.read_text()):
        assert (family.type, bool(family.documentation)) == ("gauge", True)
        for sample in family.samples:
            assert sample.timestamp is None
            labels = {k: v for k, v in sample.labels.items() if k not in ("run", "recipe", "attempt")}
            key = (sample.name, ",".join(f"{k}={v}" for k, v in sorted(labels.items())))
            assert key not in values
            values[key] = sample.value
    return values


def test_a_collected_run_is_a_file_that_node_exporter_can_read(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "textfiles"
    folder.mkdir()
    collected(store, finished(tmp_path / "run"))
    before = os.umask(0o077)
    try:
        (passed,) = pass_on(store, chosen_sinks([f"prometheus={folder}"]))
    finally:
        os.umask(before)
    assert passed.sentence() == f"prometheus ({folder}): 1 run sent"
    (path,) = folder.iterdir()
    assert path.name == f"llmlaunch-{RUN_ID}.prom"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    values = series(path)
    gpu = "gpu_uuid=GPU-n0-1,node=n0,rank=1,source=nvml process,stage=1"
    assert values["llmlaunch_gpu_memory_peak_bytes", gpu] == 30 * GIB
    assert values["llmlaunch_memory_predicted_bytes", "kind=device,stage=1"] == 11 * GIB
    assert values["llmlaunch_host_memory_peak_bytes", "node=n0,source=MemTotal - MemAvailable"] == 9 * GIB
    assert values["llmlaunch_step_seconds", ""] == 2.0
    assert values["llmlaunch_tokens_per_second", ""] == 800.0
    assert values["llmlaunch_memory_limit_bytes", ""] == 64 * GIB
    assert values["llmlaunch_run_info", "state=succeeded"] == 1


def test_what_is_there_is_not_written_again_and_what_grew_is(store: Store, tmp_path: Path) -> None:
    run = finished(tmp_path / "run")
    collected(store, run)
    sinks = chosen_sinks([f"prometheus={tmp_path}"])
    assert [delivery.sent for delivery in pass_on(store, sinks)] == [1]
    assert [(delivery.sent, delivery.sentence()) for delivery in pass_on(store, sinks)] == [(0, None)]
    written(run, (40, 30))
    collected(store, run)
    assert [delivery.sent for delivery in pass_on(store, sinks)] == [1]
    assert 40 * GIB in series(tmp_path / f"llmlaunch-{RUN_ID}.prom").values()


@pytest.fixture
def figures(store: Store, tmp_path: Path) -> Figures:
    collected(store, finished(tmp_path / "run"))
    return figures_of(stored_run(store, RUN_ID) or {})


def test_the_newest_runs_alone_keep_a_file_and_other_files_are_left_alone(figures: Figures, tmp_path: Path) -> None:
    folder = tmp_path / "textfiles"
    folder.mkdir()
    others = {"mine.prom", "llmlaunch-of-another-store.prom"}
    for name in others:
        (folder / name).touch()

    def collect_all(count: int) -> int:
        marks = {f"run{n}": "m" for n in reversed(range(count))}  # the newest first
        sink = Prometheus(str(folder))
        due = sink.due(marks)
        for run_id in due:
            sink.send(replace(figures, run_id=run_id), "m")
        sink.finish()
        return len(due)

    assert collect_all(15) == 15
    assert collect_all(30) == 15
    assert collect_all(30) == 0
    newest = {f"llmlaunch-run{n}.prom" for n in range(30 - MOST_RUNS, 30)}
    assert {path.name for path in folder.iterdir()} == newest | others


def test_of_many_gpus_the_largest_of_every_stage_are_written(figures: Figures, tmp_path: Path) -> None:
    peaks = tuple(
        MeasuredPeak("device", 1000 * (rank % 64) + rank, None, rank // 128, rank, "n", f"GPU-{rank}", "s")
        for rank in range(1024)
    )
    sink = Prometheus(str(tmp_path))
    sink.send(replace(figures, peaks=peaks), "m")
    written_peaks = [
        v for (name, _), v in series(next(tmp_path.glob("*.prom"))).items() if name.endswith("gpu_memory_peak_bytes")
    ]
    assert len(written_peaks) == MOST_PEAKS
    for stage in range(8):
        assert max(p.peak_bytes for p in peaks if p.stage == stage) in written_peaks


def test_names_that_mean_something_to_the_format_come_back_as_they_were(figures: Figures, tmp_path: Path) -> None:
    nasty = 'a"b\\c\nd{e}=é'
    sink = Prometheus(str(tmp_path))
    sink.send(replace(figures, run_id="../" + nasty, recipe=nasty, peaks=(MeasuredPeak("host", 5, node=nasty),)), "m")
    (path,) = tmp_path.glob("*.prom")
    labels = [s.labels for f in text_string_to_metric_families(path.read_text()) for s in f.samples if s.value == 5]
    assert [(label["recipe"], label["node"], label["run"]) for label in labels] == [(nasty, nasty, "../" + nasty)]
