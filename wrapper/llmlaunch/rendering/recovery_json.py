"""The part of run.json that says what follows when an attempt ends early, and how a job is told in time."""

from __future__ import annotations

from math import ceil

from llmlaunch.backends.base import Rendered
from llmlaunch.backends.checkpoints import lead_seconds, refuse_short_time, save_seconds, tracker
from llmlaunch.planner.plan import Plan
from llmlaunch.recipe.types import Recipe

__all__ = [
    "FALLBACK_FOLDER",
    "fallback_folder",
    "late_end_seconds",
    "progress_json",
    "recovery",
    "restart_by",
    "warning_seconds",
]

FALLBACK_FOLDER = "fallback"
LEAST_LATE_END_SECONDS = 60


def recovery(recipe: Recipe, plan: Plan) -> dict[str, object]:
    """`restart`, `checkpoint`, `fallbacks` and `after_checkpoint` of run.json (docs/run-directory.md)."""
    return {
        "restart": _restart(recipe),
        "checkpoint": _checkpoint(recipe),
        "fallbacks": _fallbacks(plan),
        "after_checkpoint": recipe.on_oom.after_checkpoint,
    }


def fallback_folder(place: int) -> str:
    """Where a layout lies in the run directory: the planned one, 0, in it, the first fallback in fallback/1."""
    return f"{FALLBACK_FOLDER}/{place}" if place else ""


def _fallbacks(plan: Plan) -> list[dict[str, object]]:
    """The chain of layouts, the same in the planned one's file and in each of theirs."""
    layouts = plan.fallbacks.layouts if plan.fallbacks else ()
    return [
        {
            "layout": fallback_folder(number),
            "keeps_checkpoints": fallback.keeps_checkpoints,
            "loads": [fallback_folder(place) for place, able in enumerate(fallback.loads) if able],
        }
        for number, fallback in enumerate(layouts, start=1)
    ]


def restart_by(recipe: Recipe) -> str | None:
    """How the job comes back: "requeue" or "chain"; None where it does not."""
    return None if recipe.restart is None else recipe.restart.by or recipe.cluster.site.restart_by or "requeue"


def _chain(plan: Plan) -> list[Plan]:
    """Every layout that one job may run."""
    return [plan, *(fallback.plan for fallback in (plan.fallbacks.layouts if plan.fallbacks else ()))]


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


def _restart(recipe: Recipe) -> dict[str, object] | None:
    if recipe.restart is None:
        return None
    return {
        "by": restart_by(recipe),
        "times": recipe.restart.times,
        "fruitless": recipe.restart.fruitless,
        "backoff_seconds": recipe.restart.backoff_seconds,
    }


def _checkpoint(recipe: Recipe) -> dict[str, object] | None:
    """None where no checkpoints are written. A script of the person's own promises no tracker; of it the last step that
    should have been saved counts."""
    training = recipe.training
    if training.checkpoint_path is None:
        return None
    return {
        "path": training.checkpoint_path,
        "tracker": tracker(recipe),
        "promised": recipe.backend.script is None,
        "interval": training.save_interval,
    }


LEAST_SAVING_SECONDS = 1800.0
SAVES_OF_PATIENCE = 3.0


def progress_json(recipe: Recipe, plan: Plan, rendered: Rendered) -> dict[str, object]:
    """docs/watchdog.md says what each is. The times are null where the recipe says `watchdog: off`: progress is noted,
    and nothing is ended."""
    watchdog = recipe.watchdog
    saves = recipe.training.checkpoint_path is not None
    expected = save_seconds(recipe, plan.layout) if saves else 0.0
    return {
        "step_patterns": list(rendered.progress.step_patterns),
        "slow_patterns": list(rendered.progress.slow_patterns),
        "promised": rendered.progress.promised,
        "steps": recipe.training.steps,
        "tokens_per_step": recipe.workload.global_batch_size * recipe.workload.sequence_length,
        "floor_seconds": None if watchdog is None else watchdog.floor_seconds,
        "first_step_seconds": None if watchdog is None else watchdog.first_step_seconds,
        # a script of the person's own may save without a word
        "save_every": None if rendered.progress.promised else recipe.training.save_interval,
        "saving_seconds": max(LEAST_SAVING_SECONDS, SAVES_OF_PATIENCE * expected),
    }
