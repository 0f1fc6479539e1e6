"""From a recipe to a plan: search and choose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmlaunch.backends.base import Backend
from llmlaunch.calibration.lessons import NO_LESSONS, Lessons
from llmlaunch.cluster.profile import Cluster
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.estimator import NOT_MODELLED, estimate
from llmlaunch.memory.job import Job
from llmlaunch.planner.host import node_of
from llmlaunch.planner.host_link import host_link_said
from llmlaunch.planner.length import job_length, time_limit_said
from llmlaunch.planner.plan import Limit, Plan, as_planned
from llmlaunch.planner.rehearsed import REHEARSED
from llmlaunch.planner.search import BROKEN_ESTIMATE, HOST_MEMORY, MEMORY, OUTPACED, Found
from llmlaunch.planner.setting import Setting, setting_of
from llmlaunch.recipe.types import Recipe
from llmlaunch.timing.flops import model_flops_per_token
from llmlaunch.timing.step import step_time
from llmlaunch.units import GIB

if TYPE_CHECKING:
    from llmlaunch.planner.change import Change

__all__ = ["make_plan", "plan_of"]

ALTERNATIVES = 5


def make_plan(
    recipe: Recipe, backend: Backend, baseline_bytes: int | None = None, lessons: Lessons = NO_LESSONS
) -> Plan:
    """The fastest safe layout, or the closest unsafe one with advice.

    `baseline_bytes` replaces what the facts hold outside torch: on a CPU, the measured resident memory of a trainer
    that has imported everything and does nothing. `lessons` is what measured runs say of the recipe's plans.

    Raises:
        UserError: no layout is legal at all; the message names the rule that refuses the most.
    """
    setting = setting_of(recipe, backend, baseline_bytes, lessons)
    found = setting.search()
    if not len(found.points):
        from llmlaunch.planner.empty import no_layout  # what explains a failure is imported only then

        raise no_layout(setting)
    safe = bool(np.any(found.safe))
    return plan_of(setting, found, 0, change=None if safe else _smallest_change(setting))


def plan_of(setting: Setting, found: Found, place: int, change: Change | None = None) -> Plan:
    """The plan of the layout at `place` of the ranking. `change` is what would make it safe."""
    recipe, limit, host = setting.recipe, setting.limit, setting.host_limit
    safe = bool(np.any(found.safe))
    chosen = found.candidate(recipe, place)
    said = as_planned(recipe, chosen)
    job = setting.job_of(said)
    peak_kind = "device" if recipe.cluster.accelerator.kind == "gpu" else "resident"
    detail = estimate(job, chosen.layout, peak_kind=peak_kind, node=node_of(recipe))
    length = job_length(recipe, chosen.step_seconds)
    others = [i for i in range(min(len(found.first), ALTERNATIVES + 2)) if i != place][:ALTERNATIVES]
    return Plan(
        recipe=recipe.name,
        verdict="safe" if safe and detail.fault is None else "unsafe",
        chosen=chosen,
        estimate=detail,
        limit=limit,
        host_limit=host,
        step_terms=_step_terms(setting.cluster, job, chosen.layout),
        mfu=_utilisation(recipe, chosen.step_seconds),
        length=length,
        searched=found.searched,
        refused=found.refused,
        refusal_sentences=_sentences(found, limit, host),
        alternatives=tuple(found.candidate(recipe, i) for i in others),
        not_modelled=NOT_MODELLED,
        assumptions=(
            *recipe.assumptions,
            *_baseline_said(job, peak_kind, setting.baseline_bytes),
            *time_limit_said(recipe, length),
            *host_link_said(said, job, chosen.layout),
        ),
        advice=None if safe else _advice(change),
        changes=None if change is None else change.settings,
        correction=setting.lessons.correction,
        rehearsed=found.rehearsed.get(int(found.first[place])),
    )


def _smallest_change(setting: Setting) -> Change | None:
    from llmlaunch.planner.smallest_change import smallest_change

    return smallest_change(setting)


def _advice(change: Change | None) -> str:
    from llmlaunch.planner.smallest_change import advice

    return advice(change)


def _baseline_said(job: Job, peak_kind: str, baseline_bytes: int | None) -> tuple[str, ...]:
    if peak_kind != "resident":
        return ()
    where = "measured on this machine" if baseline_bytes is not None else "as on another machine; submit measures it"
    return (f"an idle trainer takes {job.facts.context_bytes / GIB:.2f} GiB, {where}",)


def _utilisation(recipe: Recipe, step_seconds: float) -> float | None:
    work = recipe.workload
    peak = recipe.cluster.accelerator.flops_per_second.get(work.precision)
    flops = model_flops_per_token(recipe.model, work.sequence_length) * work.tokens_per_step
    return None if peak is None else flops / step_seconds / recipe.world_size / peak


def _step_terms(cluster: Cluster, job: Job, layout: Layout) -> dict[str, float]:
    columns = LayoutColumns.of([layout])
    terms = step_time(job, cluster, columns).terms
    return {name: float(column[0]) for name, column in terms.items()}


def _sentences(found: Found, limit: Limit, host: Limit) -> dict[str, str]:
    failed = (rule for rule in found.rules if rule.key in found.refused)
    said = {rule.key: f"{rule.sentence} ({rule.where})" for rule in failed}
    if MEMORY in found.refused:
        said[MEMORY] = f"the worst pipeline rank needs more than {limit.limit_bytes / GIB:.1f} GiB: {limit.reason}"
    if BROKEN_ESTIMATE in found.refused:
        said[BROKEN_ESTIMATE] = (
            "the estimate contradicts itself, so nothing is known of the memory: a bug of llmlaunch, please report it "
            "with the recipe"
        )
    if OUTPACED in found.refused:
        said[OUTPACED] = "uneven stages that take longer than the layouts shown even if cut into equal times"
    if HOST_MEMORY in found.refused:
        said[HOST_MEMORY] = f"a node's processes need more than {host.limit_bytes / GIB:.1f} GiB: {host.reason}"
    if REHEARSED in found.refused:
        refuted = {one.layout.describe(): one.sentence for one in found.rehearsed.values() if not one.safe}
        said[REHEARSED] = "; ".join(f"{layout}: {sentence}" for layout, sentence in refuted.items())
    return said
