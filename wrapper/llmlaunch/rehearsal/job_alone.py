"""The planned job as single ranks of it run alone: without the techniques that take the other ranks, which are priced
instead.

Transformer Engine's user buffers, DeepEP and HybridEP write into the memory of other devices; a trace captures no CUDA
graph. Such a technique is left out of what runs, the job is rendered again without it, and what the estimate says it
takes is added to what is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from llmlaunch.frameworks.base import OmittedTechnique, Rendered
from llmlaunch.frameworks.registry import framework_of
from llmlaunch.memory.estimator import RankEstimate, estimate
from llmlaunch.planner.plan import Plan, as_planned
from llmlaunch.planner.setting import Setting
from llmlaunch.recipe.types import Recipe
from llmlaunch.rehearsal.ranks import Omission
from llmlaunch.rendering.run_json import measurement_template

COMMUNICATORS = "communicators"


@dataclass(frozen=True)
class JobAlone:
    """`recipe`, `plan` and `rendered` are of the job that runs: the planned one, without what was left out. `omissions`
    says of each pipeline rank, in order, what that is and what it is priced at."""

    recipe: Recipe
    plan: Plan
    rendered: Rendered
    omissions: Sequence[tuple[Omission, ...]]

    def measurement(self) -> dict[str, object]:
        """Return the measurement record of what runs, without a peak."""
        return measurement_template(self.recipe, self.plan)


def job_alone(setting: Setting, recipe: Recipe, plan: Plan, rendered: Rendered, traced: bool) -> JobAlone:
    """Return what runs on a GPU, or is `traced`. `recipe`, `plan` and `rendered` are the planned job's, which is
    returned as it is where nothing has to be left out."""
    omitted = framework_of(recipe).omitted_alone(recipe, traced)
    ranks = _estimated_ranks(setting, recipe, plan)
    omissions: list[tuple[Omission, ...]] = [()] * len(ranks)
    alone, chosen = recipe, plan.chosen
    for technique in omitted:
        chosen = replace(chosen, techniques=replace(chosen.techniques, **technique.instead))
        alone = as_planned(recipe, chosen)
        fewer = _estimated_ranks(setting, alone, plan)
        omissions = [
            (*before, _omission(technique, *pair)) for before, *pair in zip(omissions, ranks, fewer, strict=True)
        ]
        ranks = fewer
    if chosen == plan.chosen:
        return JobAlone(recipe, plan, rendered, omissions)
    rendered_alone = setting.backend.render(alone, plan.layout)
    return JobAlone(alone, replace(plan, chosen=chosen), rendered_alone, omissions)


def _estimated_ranks(setting: Setting, recipe: Recipe, plan: Plan) -> tuple[RankEstimate, ...]:
    return estimate(setting.job_of(recipe), plan.layout).ranks


def _omission(technique: OmittedTechnique, planned: RankEstimate, without: RankEstimate) -> Omission:
    if not technique.instead:
        return Omission(technique.name, technique.why, None)
    return Omission(technique.name, technique.why, _difference(planned.terms, without.terms))


def _difference(planned: Mapping[str, int], without: Mapping[str, int]) -> dict[str, int]:
    names = dict.fromkeys((*planned, *without))
    more = {name: planned.get(name, 0) - without.get(name, 0) for name in names if name != COMMUNICATORS}
    return {name: count for name, count in more.items() if count}
