"""What a choice among measured layouts would have cost: of every group of runs that differ in their layout alone, the
one the planner would take against the fastest one measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmlaunch.accuracy.summary import measured_step_seconds
from llmlaunch.calibration.cases import Case, Unsupported
from llmlaunch.cluster.profile import Cluster
from llmlaunch.frameworks.base import StateTechniques, StepTechniques
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.estimator import estimate
from llmlaunch.memory.job import Job
from llmlaunch.planner.preference import preference_factor
from llmlaunch.planner.pricing import Points, Rows
from llmlaunch.timing.step import step_time
from support.recipes import recipe_of
from validation.cases import case_of

Group = tuple[str, int, int, int]  # model, tokens of a sequence, sequences of a step, devices


@dataclass(frozen=True)
class MeasuredLayout:
    """One measured layout: its seconds of a step, None where it ran out of memory, and the bytes its fullest device is
    predicted to need."""

    id: str
    group: Group
    job: Job
    cluster: Cluster
    case: Case
    seconds: float | None
    device_bytes: int


@dataclass(frozen=True)
class Choice:
    """What was chosen of a group, the fastest of all measured, and the fastest of those called safe."""

    chosen: MeasuredLayout | None
    best: MeasuredLayout
    best_safe: MeasuredLayout | None

    @property
    def dead(self) -> bool:
        """It ran out of memory."""
        return self.chosen is not None and self.chosen.seconds is None

    @property
    def regret(self) -> float | None:
        """Share of the best measured speed that the choice loses; None where nothing is safe, all where it died."""
        if self.chosen is None:
            return None
        return _lost(self.chosen, self.best)

    @property
    def of_time_alone(self) -> float | None:
        """The same against the best of the safe: what the step times, not the caution about memory, lose."""
        return None if self.chosen is None or self.best_safe is None else _lost(self.chosen, self.best_safe)


def _lost(chosen: MeasuredLayout, best: MeasuredLayout) -> float:
    assert best.seconds is not None
    return 1.0 if chosen.seconds is None else 1.0 - best.seconds / chosen.seconds


def measured_layouts(records: Iterable[Mapping[str, Any]], clusters: Mapping[str, Cluster]) -> list[MeasuredLayout]:
    """The records that tell a speed or a death, of machines that `clusters` has by the records' `gpu`."""
    found = []
    for record in records:
        try:
            case = case_of(record, clusters)
        except Unsupported:
            continue
        seconds = measured_step_seconds(record, case)
        if case.cluster is None or not (seconds or record["peak_kind"] == "oom"):
            continue
        work = case.job.workload
        group = (case.job.shape.name, work.sequence_length, work.global_batch_size, case.layout.world_size)
        needed = estimate(case.job, case.layout, case.num_microbatches).worst.device_bytes
        found.append(
            MeasuredLayout(str(record["id"]), group, case.timed_job or case.job, case.cluster, case, seconds, needed)
        )
    return found


def predicted(runs: Sequence[MeasuredLayout]) -> np.ndarray:
    """Predicted seconds of a step of each run; runs of one job are timed together."""
    seconds = np.zeros(len(runs))
    left = list(range(len(runs)))
    while left:
        first = runs[left[0]]
        same = [i for i in left if runs[i].job == first.job and runs[i].cluster == first.cluster]
        columns = LayoutColumns.of([runs[i].case.layout for i in same])
        counts = np.array([runs[i].case.num_microbatches for i in same])
        seconds[same] = step_time(first.job, first.cluster, columns, counts).total
        left = [i for i in left if i not in same]
    return seconds


def preferred(runs: Sequence[MeasuredLayout]) -> np.ndarray:
    """Predicted seconds of each run with what the preference adds to them: the order of the planner's ranking."""
    return predicted(runs) * np.array([_preference(run) for run in runs])


def _preference(run: MeasuredLayout) -> float:
    layout, place, one = run.case.layout, np.zeros(1, dtype=np.int64), np.ones(1)
    base = recipe_of("llama3-8b")
    training = replace(base.training, sequence_length=run.job.workload.sequence_length)
    rows = Rows(place, place, place, place, place, one, place, one, one)
    step, state = StepTechniques(recompute=layout.recompute), StateTechniques(zero_stage=layout.zero_stage)
    points = Points(LayoutColumns.of([layout]), (step,), (state,), rows)
    return float(preference_factor(replace(base, cluster=run.cluster, training=training), points)[0])


def choose(runs: Sequence[MeasuredLayout], order: np.ndarray, limit_bytes: Mapping[str, float]) -> dict[Group, Choice]:
    """By group, the safe run with the least of `order`. `limit_bytes` is by name of the accelerator. Groups in which
    nothing was measured are left out."""
    choices = {}
    for group in sorted({run.group for run in runs}):
        mine = [i for i, run in enumerate(runs) if run.group == group]
        safe = [i for i in mine if runs[i].device_bytes <= limit_bytes[runs[i].cluster.accelerator.name]]
        best, best_safe = _fastest([runs[i] for i in mine]), _fastest([runs[i] for i in safe])
        if best is not None:
            chosen = runs[min(safe, key=lambda i: float(order[i]))] if safe else None
            choices[group] = Choice(chosen, best, best_safe)
    return choices


def _fastest(runs: Sequence[MeasuredLayout]) -> MeasuredLayout | None:
    return min((run for run in runs if run.seconds), key=lambda run: run.seconds or 0.0, default=None)


def rule_of_thumb(runs: Sequence[MeasuredLayout]) -> np.ndarray:
    """The order of the rule beside ours: the smallest product of tensor, context and pipeline that fits, then the
    largest micro-batch; equals in the order they come."""
    layouts = [run.case.layout for run in runs]
    keys = [(lay.tensor * lay.context * lay.pipeline, -lay.micro_batch_size, i) for i, lay in enumerate(layouts)]
    order = np.zeros(len(runs))
    order[[key[2] for key in sorted(keys)]] = np.arange(len(runs))
    return order
