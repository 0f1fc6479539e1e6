"""Plans of a recipe that ran before, each judged by the peaks and the step times that were measured then.

A run of this very job and layout is the best prediction of the next. Its peaks take the place of the estimate, and what
runs of one job differ by takes the place of the margin; one that ran out of memory refutes its layout. The step time of
runs that agree takes the place of the predicted one, and a part of what it differs by is taken for the other layouts,
too; a single run says nothing of which layout is faster (`planner/points.py`). That the job is the same is decided
by what its measurement record is priced as, and by the arguments of which nobody knows whether they take bytes.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from llmlaunch.calibration.cases import Unsupported, case_of
from llmlaunch.calibration.lessons import MeasuredStep, Rehearsal
from llmlaunch.calibration.margins import Margin
from llmlaunch.calibration.records import machine_json, ran_out, reason_of_no_whole_peak
from llmlaunch.calibration.step_times import FEWEST_TIMED_STEPS
from llmlaunch.errors import UserError
from llmlaunch.frameworks.classed_arguments import UNKNOWN
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.job import NO_CORRECTION, Job
from llmlaunch.planner.plan import Plan
from llmlaunch.planner.setting import Setting
from llmlaunch.recipe.types import Recipe
from llmlaunch.rehearsal.verdict import MALFORMED, RUNS_DIFFER, plan_of_one, same_version
from llmlaunch.rendering.run_json import measurement_template
from llmlaunch.store.history import MeasuredAttempt
from llmlaunch.techniques import Techniques
from llmlaunch.timing.step import step_time
from llmlaunch.units import GIB
from llmlaunch.verdicts import SAFE, TIGHT, UNSAFE

OF_DEVICE = ("backend", "gpu", "gpu_memory_bytes")  # of a record
# Of a run's error that the other layouts of its job share: the regression of one layout's error on another's is 0.36 on
# A100s (the public grid of Fujii et al.), 0.36 to 0.86 on NVIDIA's published B200, GB200 and GB300.
NEIGHBOUR_SHARE = 0.5
MOST_OWN = (
    0.1  # of a logarithm that is a layout's own: what is more, a slow machine or kernel, all its neighbours share
)
NEWEST = 5  # runs of a layout whose median counts: drivers and code change
AGREE = 0.03  # share of the median that the step times of two runs may lie off it; they are repeated within 1 or 2 %


@dataclass(frozen=True)
class OwnRuns:
    """What runs of this very job show of its layouts: of each layout the newest word on its memory, and the step times.
    `job_factor` multiplies the seconds that are predicted of all its layouts, where the times of some decide;
    `shared_factor` is what single runs show of all layouts, where none does."""

    rehearsals: tuple[Rehearsal, ...]
    steps: tuple[MeasuredStep, ...]
    job_factor: float
    shared_factor: float


@dataclass(frozen=True)
class _OwnAttempt:
    """An attempt of this very job: its plan as it is made today, and its records."""

    attempt: MeasuredAttempt
    recipe: Recipe
    plan: Plan
    records: tuple[Mapping[str, Any], ...]

    @property
    def key(self) -> str:
        return json.dumps([self.plan.layout.as_json(), self.recipe.techniques.as_json()])


def own_runs_of(attempts: Sequence[MeasuredAttempt], setting: Setting) -> OwnRuns:
    """Return what attempts, the newest first, show of the setting's own layouts. Those of other jobs, and those that
    tell nothing, are left out."""
    judged: dict[str, Rehearsal] = {}
    timed: dict[str, list[tuple[_OwnAttempt, float]]] = {}
    for attempt in attempts:
        with suppress(UserError, Unsupported, *MALFORMED):  # what cannot be rendered today, or is no record of ours
            own = _own_attempt(attempt, setting)
            if own is None or not own.records:
                continue
            seconds = _step_seconds(own, setting)
            if seconds is not None:
                timed.setdefault(own.key, []).append((own, seconds))
            result = _judged(own)
            if result is not None:
                judged.setdefault(own.key, result)
    steps = tuple(_measured_step(of_layout) for of_layout in timed.values())
    decisive = [step for step in steps if step.decides]
    single = [] if decisive else steps
    return OwnRuns(tuple(judged.values()), steps, _job_factor(decisive, setting), _job_factor(single, setting))


def _own_attempt(attempt: MeasuredAttempt, setting: Setting) -> _OwnAttempt | None:
    recipe, layout = setting.recipe, Layout.from_json(attempt.plan["layout"])
    nodes, rest = divmod(layout.world_size, recipe.cluster.devices_per_node)
    if rest or (recipe.nodes and recipe.nodes != nodes):
        return None
    training = replace(recipe.training, gradient_dtype=attempt.plan["gradient_dtype"])
    techniques = Techniques.from_json(attempt.plan["techniques"])
    planned = replace(recipe, nodes=nodes, techniques=techniques, training=training)
    if not _same_unknown(attempt.plan.get("arguments"), setting.backend.classed_arguments(planned, layout).as_json()):
        return None
    own = setting.with_recipe(planned)
    plan = plan_of_one(own, layout)
    records = tuple(record for record in attempt.records if _same_job(record, own, plan))
    return _OwnAttempt(attempt, planned, plan, records)


def _judged(own: _OwnAttempt) -> Rehearsal | None:
    deaths = [record for record in own.records if ran_out(record)]
    if deaths:
        return _rehearsal(own, deaths[0], None)
    kind = own.plan.estimate.peak_kind
    peaks = [record for record in own.records if record["peak_kind"] == kind and record["peak_bytes"]]
    whole = [record for record in peaks if reason_of_no_whole_peak(record) is None]
    if len({record["global_rank"] for record in whole}) < own.plan.layout.world_size:
        return None
    worst = max(whole, key=lambda record: int(record["peak_bytes"]))
    return _rehearsal(own, worst, int(worst["peak_bytes"]))


def _step_seconds(own: _OwnAttempt, setting: Setting) -> float | None:
    """Return the step time of an attempt on this machine; None where it made too few steps, or says nothing."""
    machine = json.loads(json.dumps(machine_json(setting.recipe.cluster)))
    for record in own.records:
        seconds, steps = record.get("step_seconds"), (record.get("observed") or {}).get("steps_run")
        enough = not isinstance(steps, int) or steps >= FEWEST_TIMED_STEPS
        if seconds and enough and record.get("machine", machine) == machine:
            return float(seconds)
    return None


def _measured_step(attempts: Sequence[tuple[_OwnAttempt, float]]) -> MeasuredStep:
    """Return the step time of a layout by its `attempts`, the newest first. Those of one run are one word: they may
    have had the same slow node."""
    newest = attempts[0][0]
    by_run: dict[str, list[float]] = {}
    for own, seconds in attempts:
        by_run.setdefault(own.attempt.run_id, []).append(seconds)
    times = [median(of_run) for of_run in by_run.values()][:NEWEST]
    middle = median(times)
    return MeasuredStep(
        workload=newest.recipe.workload,
        layout=newest.plan.layout,
        techniques=newest.recipe.techniques,
        gradient_dtype=newest.recipe.training.gradient_dtype,
        step_seconds=middle,
        runs=len(times),
        run_id=newest.attempt.run_id,
        agreeing=sum(abs(seconds - middle) <= AGREE * middle for seconds in times),
    )


def _job_factor(steps: Sequence[MeasuredStep], setting: Setting) -> float:
    """Return the factor for the predicted step times of all layouts of the job: the mean error of those that ran,
    shrunk, because a part of it is the layout's own."""
    logarithms = []
    for step in steps:
        recipe = setting.recipe
        training = replace(recipe.training, gradient_dtype=step.gradient_dtype)
        nodes = step.layout.world_size // recipe.cluster.devices_per_node
        sized = setting.with_recipe(replace(recipe, nodes=nodes, techniques=step.techniques, training=training))
        predicted = float(step_time(sized.job, sized.cluster, LayoutColumns.of([step.layout])).total[0])
        off = math.log(step.step_seconds / predicted)
        logarithms.append(math.copysign(max(NEIGHBOUR_SHARE * abs(off), abs(off) - MOST_OWN), off))
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else 1.0


def _same_unknown(then: Mapping[str, Sequence[str]] | None, now: Mapping[str, Sequence[str]] | None) -> bool:
    """Return whether each argument of which nobody knows what it takes was among those of the other job: a record does
    not hold it. `then` and `now` are the arguments by class."""
    before, today = then or {}, now or {}
    texts_before = {text for texts in before.values() for text in texts}
    texts_today = {text for texts in today.values() for text in texts}
    return texts_today.issuperset(before.get(UNKNOWN, ())) and texts_before.issuperset(today.get(UNKNOWN, ()))


def _same_job(record: Mapping[str, Any], own: Setting, plan: Plan) -> bool:
    """Return whether a record is of the job that is planned: whether both are priced as one. The model's name makes no
    difference, and neither does what measured runs correct."""
    recipe, template = own.recipe, measurement_template(own.recipe, plan)
    if not same_version(record, recipe) or any(record.get(name) != template[name] for name in OF_DEVICE):
        return False
    cluster = recipe.cluster
    case = case_of({**record, "baseline_bytes": own.baseline_bytes}, {cluster.accelerator.name: cluster})
    return case.layout == plan.layout and _unnamed(case.job) == _unnamed(own.job)


def _unnamed(job: Job) -> Job:
    return replace(job, shape=replace(job.shape, name=""), correction=NO_CORRECTION)


def _rehearsal(own: _OwnAttempt, worst: Mapping[str, Any], peak_bytes: int | None) -> Rehearsal:
    """Judge a plan by its worst rank; `peak_bytes` None: that ran out of memory."""
    attempt, recipe, plan = own.attempt, own.recipe, own.plan
    layout, device_bytes = plan.layout, plan.limit.memory_bytes if peak_bytes is None else peak_bytes
    limit = _limit(plan, recipe, device_bytes)
    verdict = UNSAFE if peak_bytes is None else limit.verdict_of(device_bytes)
    predicted = plan.estimate.worst.device_bytes
    rank = int(worst.get("pipeline_rank") or 0)
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(attempt.started_at))
    peak = "it ran out of memory" if peak_bytes is None else f"{peak_bytes / GIB:.2f} GiB {plan.estimate.peak_kind}"
    sentence = (
        f"this very job ran {day} ({attempt.run_id}): {peak} on its worst rank, {predicted / GIB:.2f} predicted; "
        f"{verdict} by it"
    )
    ranks = [
        {
            "pipeline_rank": rank,
            "stands_for": list(range(layout.pipeline)),
            "on": "run",
            "at": attempt.started_at,
            "versions": {},
            "peak_kind": plan.estimate.peak_kind,
            "predicted_bytes": predicted,
            "rehearsed_bytes": peak_bytes,
            "ran_out": peak_bytes is None,
        }
    ]
    figures = {"device_bytes": device_bytes, "limit_bytes": limit.limit_bytes}
    details = {"verdict": verdict, "sentence": sentence, "worst_pipeline_rank": rank, **figures, "ranks": ranks}
    return Rehearsal(
        workload=recipe.workload,
        layout=layout,
        techniques=recipe.techniques,
        gradient_dtype=recipe.training.gradient_dtype,
        safe=verdict == SAFE,
        tight=verdict == TIGHT,
        short_bytes=max(device_bytes - predicted, 0),
        ran_out=peak_bytes is None,
        sentence=sentence,
        details=details,
        **figures,
    )


def _limit(plan: Plan, recipe: Recipe, device_bytes: int) -> Margin:
    """Return how far a device may be filled by a run that was measured: what runs of one job differ by stays free, and
    the recipe's floor; never less than the limit of estimates allows, nor another limit than the recipe asks for."""
    limit, policy = plan.limit, recipe.memory
    if policy.limit is not None or policy.risk is not None or plan.estimate.peak_kind != "device":
        return limit
    measured = limit.memory_bytes - policy.floor_bytes - round(RUNS_DIFFER * device_bytes)
    return replace(limit, limit_bytes=max(measured, limit.limit_bytes))
