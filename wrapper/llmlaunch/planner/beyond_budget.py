"""What is nearest to a recipe's budget where no plan stays within it: a number of nodes, or a larger budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from llmlaunch.errors import UserError
from llmlaunch.planner.no_legal_layout import tightest_rule
from llmlaunch.planner.plan import NodeTrial, Plan, Sizing, budget_shares, most_exceeded
from llmlaunch.planner.setting import Setting, within_budget
from llmlaunch.planner.sizing import (
    DEFAULT_MOST_NODES,
    length_text,
    most_nodes,
    smallest_cluster,
    splittable,
    sufficient_budget,
)

BUDGET_CANDIDATES = 150_000  # of the search for nodes that stay within the recipe's budget (`PricingBudget`)


def nearest_count(setting: Setting, sizing: Sizing) -> NodeTrial:
    """Return the best of counts that all fail: the safe one that exceeds the budget least, else the one whose memory
    is nearest to fitting."""
    recipe = setting.recipe
    safe = [(trial, trial.length) for trial in sizing.tried if trial.length is not None]
    if safe:
        return min(safe, key=lambda pair: max(budget_shares(recipe.budget, pair[1]).values(), default=0.0))[0]
    legal = [trial for trial in sizing.tried if trial.device_bytes is not None]
    if not legal:
        first, last = sizing.tried[0], sizing.tried[-1]
        can_split = splittable(setting, np.array([first.nodes]))[0]
        rule = tightest_rule(setting.with_recipe(replace(recipe, nodes=first.nodes)))[0] if can_split else None
        why = first.reason if rule is None else f"no layout is legal: {rule.sentence} [{rule.key}]"
        raise UserError(
            f"{recipe.path}: nodes: auto: no number of nodes up to {last.nodes} has a legal layout; "
            f"on {first.nodes}, {why}; change the batch or the pins accordingly"
        )
    return min(legal, key=lambda trial: trial.device_bytes or 0)


def beyond_budget(setting: Setting, plan: Plan) -> str:
    """Return by what the plan exceeds the budget, and the nearest number of nodes or budget that would do."""
    recipe, budget = setting.recipe, setting.recipe.budget
    key = most_exceeded(budget, plan.length)
    allowed = getattr(budget, key or "")
    tightest = (
        f"no safe layout stays within the budget: on nodes: {recipe.nodes} the fastest, {plan.layout.describe()}, "
        f"takes {length_text(plan.length, key)} of budget.{key}: {allowed:,.10g}"
    )
    remedies, finished = within_budget(BUDGET_CANDIDATES, _remedies(setting, plan))
    if not finished:
        remedies = ["The search for what would stay within it ended at its own budget of layouts."]
    return " ".join([f"{tightest}.", *remedies])


def _remedies(setting: Setting, plan: Plan) -> Iterator[str]:
    """Yield one sentence: the number of nodes, or the budget, with which a plan would not exceed it."""
    recipe, budget = setting.recipe, setting.recipe.budget
    within = plan.sizing or smallest_cluster(setting, 1, most_nodes(recipe))
    most = within.tried[-1].nodes
    if within.nodes is not None:
        yield f"The fewest that stay within it: nodes: {within.nodes} ({_last_length_text(within)})."
        return
    more = smallest_cluster(setting, most + 1, DEFAULT_MOST_NODES)
    if more.nodes is not None:
        yield f"More would: budget.max_nodes: {more.nodes} ({_last_length_text(more)})."
        return
    nearest = nearest_count(setting, Sizing(within.tried + more.tried))
    length = nearest.length or plan.length
    yield (
        f"No number of nodes up to {max(most, DEFAULT_MOST_NODES)} does; nodes: {nearest.nodes} would with "
        f"{sufficient_budget(budget, length)}."
    )


def _last_length_text(sizing: Sizing) -> str:
    length = sizing.tried[-1].length
    return length_text(length) if length is not None else ""
