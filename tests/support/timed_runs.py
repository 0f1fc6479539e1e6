"""Runs whose step was timed, made up for tests: what is predicted with hidden factors, and noise."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llmlaunch.calibration.cases import Case
from llmlaunch.calibration.evidence import job_class
from llmlaunch.calibration.records import TimeClass, time_class
from llmlaunch.calibration.step_times import TimedRun, predicted_seconds
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.planner.planning import plan_of
from llmlaunch.planner.search import search
from llmlaunch.planner.setting import Setting
from llmlaunch.rendering.run_json import measurement_template
from llmlaunch.timing.correction import TimeCorrection, corrected_cluster
from llmlaunch.timing.step import step_time
from support.plans import gallery_setting

SMALL, LARGE = "llama3-8b", "llama3-70b"
LAYOUTS = (
    (SMALL, Layout(2, 1, data=16, zero_stage=1, sequence_parallel=1)),
    (SMALL, Layout(1, 1, data=32, zero_stage=1)),
    (SMALL, Layout(4, 2, data=4, zero_stage=1, sequence_parallel=1)),
    (SMALL, Layout(8, 1, data=4, zero_stage=1, sequence_parallel=1)),
    (SMALL, Layout(1, 4, data=8, zero_stage=1)),
    (LARGE, Layout(8, 8, data=1, zero_stage=1, sequence_parallel=1)),
    (LARGE, Layout(8, 4, data=2, zero_stage=1, sequence_parallel=1)),
    (LARGE, Layout(4, 8, data=2, zero_stage=1, sequence_parallel=1)),
    (LARGE, Layout(4, 16, data=1, zero_stage=1, sequence_parallel=1)),
)


def setting_named(name: str) -> Setting:
    """Return the setting of 8B on four nodes or of 70B on eight, on the same machine."""
    return gallery_setting(name, *(["nodes=8"] if name == LARGE else []))


def dense_class() -> TimeClass:
    """Return the class that the runs of LAYOUTS belong to."""
    return time_class("megatron", False, setting_named(SMALL).recipe.cluster)


def timed(hidden: TimeCorrection, noise: float = 0.0, places: Iterable[int] = range(len(LAYOUTS))) -> list[TimedRun]:
    """Return runs of LAYOUTS at `places`, on a machine with hidden factors, each off by noise of this deviation."""
    chance, runs = np.random.default_rng(0), []
    for place in places:
        name, layout = LAYOUTS[place]
        setting = setting_named(name)
        count = layout.num_microbatches(setting.recipe.workload.global_batch_size)
        cluster = setting.recipe.cluster
        case = Case(setting.job, layout, count, job_class(setting.recipe), cluster)
        run = TimedRun(name, case, cluster, 1.0, (f"{place}",))
        seconds = predicted_seconds(run, hidden) * math.exp(chance.normal(0.0, noise) if noise else 0.0)
        runs.append(replace(run, seconds=seconds, lines=(f"{place} {seconds}",)))
    return runs


def records(hidden: TimeCorrection, pins: Sequence[str], **changes: Any) -> list[dict[str, Any]]:
    """Return a record of a run of 8B in each pinned layout, whose step took what is predicted with hidden factors."""
    made = []
    for number, pinned in enumerate(pins):
        setting = gallery_setting(SMALL, pinned)
        plan = plan_of(setting, search(setting), 0)
        columns = LayoutColumns.of([plan.layout])
        seconds = float(step_time(setting.job, corrected_cluster(setting.cluster, hidden), columns).total[0])
        template = measurement_template(setting.recipe, plan)
        about = {"schema": 1, "id": f"t{number}/1/rank0/device", "run_id": f"t{number}", "attempt": "1"}
        timed_record = {
            "step_seconds": seconds,
            "observed": {"steps_run": 20},
            "run_state": "cancelled",
            "peak_bytes": 1,
        }
        made.append(json.loads(json.dumps({**template, **about, **timed_record, **changes})))
    return made
