"""Runs with measured peaks, collected into a store from directories made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmlaunch.store.collect import collect
from llmlaunch.store.database import Store
from llmlaunch.store.history import stored_run
from llmlaunch.store.run_figures import figures_of
from support.store_run_dirs import GIB, RUN_ID, STARTED, RunDir, gpu

PLAN = {
    "recipe": "tiny",
    "verdict": "safe",
    "layout": {"tensor": 1, "pipeline": 2, "micro_batch_size": 4, "layers_by_stage": [1, 1]},
    "memory": {
        "limit_bytes": 64 * GIB,
        "ranks": [{"pipeline_rank": 0, "device_bytes": 10 * GIB}, {"pipeline_rank": 1, "device_bytes": 11 * GIB}],
    },
    "step_seconds": 2.5,
}


def finished(path: Path, run_id: str = RUN_ID, peaks_gib: tuple[float, ...] = (20, 30), **status: Any) -> RunDir:
    """A run of one node and two GPUs, a stage each, that has ended."""
    run = RunDir(path, kind="gpu", devices=2, pipeline=2, run_id=run_id)
    run.write("plan.json", PLAN)
    run.ranks()
    written(run, peaks_gib)
    run.write("attempts/77.0/progress.json", {"schema": 1, "step": 50, "step_seconds": 2.0, "tokens_per_second": 800.0})
    run.status(**status)
    return run


def written(run: RunDir, peaks_gib: tuple[float, ...]) -> None:
    gpus = [
        gpu(n, peak_gib=peak + 1, process_peak_bytes={str(1000 + n): int(peak * GIB)})
        for n, peak in enumerate(peaks_gib)
    ]
    processes = [{"rank": n, "pid": 1000 + n, "resident_bytes": GIB, "resident_peak_bytes": 2 * GIB} for n in (0, 1)]
    run.line("n0", gpus=gpus, processes=processes, host={"used_peak_bytes": 9 * GIB, "total_bytes": 99 * GIB})


def exported(store: Store, *runs: RunDir) -> list[str]:
    """The lines of their export, once they are collected."""
    outcomes = collect(store, [run.path for run in runs])
    assert {outcome.did for outcome in outcomes} == {"collected"}, outcomes
    return [json.dumps(figures_of(stored_run(store, str(outcome.run_id)) or {})) + "\n" for outcome in outcomes]


__all__ = ["GIB", "PLAN", "RUN_ID", "STARTED", "exported", "finished", "written"]
