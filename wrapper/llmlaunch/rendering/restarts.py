"""How a job comes back after it ends: what its scripts and run.json say of that."""

from __future__ import annotations

from math import ceil

from llmlaunch.frameworks.checkpoints import lead_seconds, refuse_short_time, save_seconds
from llmlaunch.planner.plan import Plan
from llmlaunch.recipe.types import Recipe


def is_placed(recipe: Recipe) -> bool:
    """Whether the job chooses the order of its nodes."""
    return recipe.placement == "auto" and recipe.nodes > 1


LEAST_LATE_END_SECONDS = 60


def restart_by(recipe: Recipe) -> str | None:
    """How the job comes back: "requeue" or "chain"; None where it does not."""
    return None if recipe.restart is None else recipe.restart.by or recipe.cluster.site.restart_by or "requeue"


def _chain(plan: Plan) -> list[Plan]:
    """Every layout that one job may run."""
    fallbacks = plan.fallbacks.layouts if plan.fallbacks else ()
    fewer = plan.fewer_nodes.plans if plan.fewer_nodes else ()
    return [plan, *(fallback.plan for fallback in fallbacks), *(reduced for _, reduced in fewer)]


def warning_seconds(recipe: Recipe, plan: Plan) -> int | None:
    """How long before its time limit the job is told to save, whichever of its layouts runs by then; None where it does
    not come back.

    Raises UserError where the time limit leaves too little to train.
    """
    if recipe.restart is None:
        return None
    lead = max(lead_seconds(recipe, of_chain.layout, of_chain.chosen.step_seconds) for of_chain in _chain(plan))
    refuse_short_time(recipe, lead)
    return lead


def late_end_seconds(recipe: Recipe, plan: Plan) -> int:
    """How much later than the first node the last may end: some write more of a checkpoint than others."""
    if recipe.training.checkpoint_path is None:
        return LEAST_LATE_END_SECONDS
    return max(LEAST_LATE_END_SECONDS, *(ceil(save_seconds(recipe, of_chain.layout)) for of_chain in _chain(plan)))
