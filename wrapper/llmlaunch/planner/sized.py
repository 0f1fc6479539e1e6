"""A plan with everything a recipe may leave open: how many nodes, and whether the job stays within its budget."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.backends.base import Backend
from llmlaunch.calibration.lessons import NO_LESSONS, Lessons
from llmlaunch.errors import UserError
from llmlaunch.planner.plan import Plan, Sizing, Tried
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.setting import Setting, setting_of
from llmlaunch.planner.sizing import DEFAULT_MOST_NODES, beyond, excess, most_nodes, said, smallest_cluster, sufficient
from llmlaunch.recipe.digest import recipe_digest
from llmlaunch.recipe.types import AUTO_NODES, Recipe

__all__ = ["make_sized_plan"]


def make_sized_plan(
    recipe: Recipe, backend: Backend, baseline_bytes: int | None = None, lessons: Lessons = NO_LESSONS
) -> tuple[Recipe, Plan]:
    """The recipe with its number of nodes, and its plan; for `nodes: auto` the fewest that are safe and within the
    budget, or the nearest to it. The other arguments are `make_plan`'s.

    Raises:
        UserError: no layout is legal at all, on any number of nodes.
    """
    setting = setting_of(replace(recipe, nodes=recipe.nodes or 1), backend, baseline_bytes, lessons)
    sizing = None
    if recipe.nodes == AUTO_NODES:
        sizing = smallest_cluster(setting, 1, most_nodes(recipe))
        recipe = _with_nodes(recipe, sizing.nodes or _nearest(recipe, sizing).nodes)
    plan = replace(make_plan(recipe, backend, baseline_bytes, lessons), sizing=sizing, budget=recipe.budget)
    if not plan.safe or beyond(recipe.budget, plan.length) is None:
        return recipe, plan
    return recipe, replace(plan, beyond_budget=_beyond(setting.of(recipe), plan))


def _with_nodes(recipe: Recipe, nodes: int) -> Recipe:
    """The same as if the person had written that number."""
    sized = replace(recipe, nodes=nodes)
    return replace(sized, digest=recipe_digest(sized))


def _nearest(recipe: Recipe, sizing: Sizing) -> Tried:
    """Of the counts that all fail: the safe one that exceeds the budget least, else the one whose memory is nearest."""
    safe = [(tried, tried.length) for tried in sizing.tried if tried.length is not None]
    if safe:
        return min(safe, key=lambda pair: excess(recipe.budget, pair[1]))[0]
    legal = [tried for tried in sizing.tried if tried.device_bytes is not None]
    if not legal:
        first, last = sizing.tried[0], sizing.tried[-1]
        raise UserError(
            f"{recipe.path}: nodes: auto: no number of nodes up to {last.nodes} has a legal layout; "
            f"on {first.nodes}, {first.reason}; change the batch or the pins accordingly"
        )
    return min(legal, key=lambda tried: tried.device_bytes or 0)


def _beyond(setting: Setting, plan: Plan) -> str:
    """What the plan takes more than the recipe allows, and the nearest that would do."""
    recipe, budget = setting.recipe, setting.recipe.budget
    key = beyond(budget, plan.length)
    allowed = getattr(budget, key or "")
    tightest = (
        f"no safe layout stays within the budget: on nodes: {recipe.nodes} the fastest, {plan.layout.describe()}, "
        f"takes {said(plan.length, key)} of budget.{key}: {allowed:,.10g}"
    )
    within = plan.sizing or smallest_cluster(setting, 1, most_nodes(recipe))
    most = within.tried[-1].nodes
    if within.nodes is not None:
        return f"{tightest}. The fewest that stay within it: nodes: {within.nodes} ({_taking(within)})."
    more = smallest_cluster(setting, most + 1, DEFAULT_MOST_NODES)
    if more.nodes is not None:
        return f"{tightest}. More would: budget.max_nodes: {more.nodes} ({_taking(more)})."
    nearest = _nearest(recipe, Sizing(within.tried + more.tried))
    length = nearest.length or plan.length
    return (
        f"{tightest}. No number of nodes up to {max(most, DEFAULT_MOST_NODES)} does; nodes: {nearest.nodes} would with "
        f"{sufficient(budget, length)}."
    )


def _taking(sizing: Sizing) -> str:
    length = sizing.tried[-1].length
    return said(length) if length is not None else ""
