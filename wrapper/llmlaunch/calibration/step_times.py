"""Measured step times gathered by configuration, each beside what it takes to predict it again.

A step time counts whatever became of its run: the first steps of a run that goes on, or that failed later, took as long
as those of one that succeeded. A rank that was rehearsed alone computed what it would in the job and sent nothing: its
seconds say something of the device and the host, and nothing of any link.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from llmlaunch.calibration.cases import NO_MACHINE, Case, model_text
from llmlaunch.calibration.pool import PRICED_BY, case_or_reason
from llmlaunch.calibration.records import REHEARSED, Record, TimeClass, problem, table_of, time_class, timed_machine
from llmlaunch.cluster.profile import Cluster
from llmlaunch.layout import LayoutColumns
from llmlaunch.models.shape import kind_of
from llmlaunch.timing.correction import TimeCorrection, corrected_cluster
from llmlaunch.timing.step import rank_alone_seconds, step_time

FEWEST_TIMED_STEPS = 5  # the first ones compile kernels and make connections; the median of five is free of them
MOST = 300  # of one class the newest configurations: that many settle five factors


@dataclass(frozen=True)
class TimedRun:
    """One configuration whose step was timed: `seconds` is the median of its attempts. `model` is equal for runs of one
    model, however they are split; `lines` has one line for each attempt, equal for equal data."""

    model: str
    case: Case
    cluster: Cluster
    seconds: float
    lines: tuple[str, ...]
    alone: int | None = None  # the pipeline rank that was rehearsed alone; None: the whole job ran
    version: str | None = None
    died: bool = False  # a timed step counts, even if its run failed later

    @property
    def family(self) -> str:
        return kind_of(self.case.job.shape)


@dataclass
class _Configuration:
    record: Record
    seconds: dict[str, float] = field(default_factory=dict)


def timed_runs(
    records: Iterable[Record], clusters: Mapping[str, Cluster]
) -> tuple[dict[TimeClass, list[TimedRun]], Counter[str]]:
    """Return the timed configurations of each class, and how many records tell nothing of step times for which reason.
    `records` come the newest first; `clusters` are machines by accelerator (`cluster.cards.machines`)."""
    configurations: dict[str, _Configuration] = {}
    left_out: Counter[str] = Counter()
    for record in records:
        reason = _reason_left_out(record)
        if reason is not None:
            left_out[reason] += 1
            continue
        key = json.dumps([_alone(record), *(record.get(name) for name in (*PRICED_BY, "machine"))], sort_keys=True)
        configuration = configurations.setdefault(key, _Configuration(record))
        configuration.seconds.setdefault(_attempt(record), float(_step_seconds(record)))
    by_class: dict[TimeClass, list[TimedRun]] = {}
    for configuration in configurations.values():
        result = _timed_run(configuration, clusters)
        if isinstance(result, str):
            left_out[result] += 1
            continue
        members = by_class.setdefault(result[0], [])
        if len(members) < MOST:
            members.append(result[1])
    return by_class, left_out


def _reason_left_out(record: Record) -> str | None:
    if problem(record) is not None or table_of(record) is None:
        return "no measurement of a backend we price"
    seconds = _step_seconds(record)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0.0 < seconds < 1e6:
        return "no step time"
    observed = record.get("observed")
    steps = observed.get("steps_run") if isinstance(observed, Mapping) else None
    if isinstance(steps, int) and steps < FEWEST_TIMED_STEPS:
        return f"fewer than {FEWEST_TIMED_STEPS} steps"
    return None if isinstance(record.get("machine"), Mapping) else "does not say on which machine its step was timed"


def _alone(record: Record) -> int | None:
    """Return the pipeline rank that was rehearsed alone; None for a record of a whole job."""
    rank = record.get("pipeline_rank")
    return rank if record.get("family") == REHEARSED and type(rank) is int else None


def _step_seconds(record: Record) -> Any:
    """Return the seconds of a step, as the record has them: of the job, or of a rank that was rehearsed alone."""
    rehearsal = record.get("rehearsal")
    if record.get("family") != REHEARSED:
        return record.get("step_seconds")
    return rehearsal.get("step_seconds") if isinstance(rehearsal, Mapping) else None


def _attempt(record: Record) -> str:
    return (
        f"{record['run_id']}/{record.get('attempt')}" if record.get("run_id") else str(record["id"]).rsplit("/", 2)[0]
    )


def _timed_run(configuration: _Configuration, clusters: Mapping[str, Cluster]) -> tuple[TimeClass, TimedRun] | str:
    """Return the class and the run, or in a few words why its step cannot be predicted."""
    record = configuration.record
    version = record.get("backend_version")
    case = case_or_reason(record, clusters)
    if isinstance(case, str):
        return case
    if case.cluster is None:
        return NO_MACHINE
    try:
        run = TimedRun(
            model=model_text(case.job.shape),
            case=case,
            cluster=timed_machine(record, case.cluster),
            seconds=median(configuration.seconds.values()),
            lines=tuple(f"{attempt}\t{seconds}" for attempt, seconds in sorted(configuration.seconds.items())),
            alone=_alone(record),
            version=version if isinstance(version, str) else None,
        )
        predicted = predicted_seconds(run)
    except (ArithmeticError, IndexError, KeyError, TypeError, ValueError):
        return NO_MACHINE
    if not 0.0 < predicted < math.inf:
        return "its step cannot be predicted"
    return time_class(str(table_of(record)), case.job.shape.moe is not None, case.cluster), run


def predicted_seconds(run: TimedRun, correction: TimeCorrection | None = None) -> float:
    """Return the seconds of a step that are predicted of a run today."""
    case = run.case
    cluster = run.cluster if correction is None else corrected_cluster(run.cluster, correction)
    if run.alone is not None:
        return rank_alone_seconds(case.job, cluster, case.layout, run.alone, case.num_microbatches)
    columns = LayoutColumns.of([case.layout])
    return float(step_time(case.job, cluster, columns, np.array([case.num_microbatches])).total[0])
