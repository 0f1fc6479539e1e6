"""run.json's "progress": what the watchdog on the batch host reads the logs by, and how long it waits."""

from __future__ import annotations

from llmlaunch.backends.base import Rendered
from llmlaunch.backends.checkpoints import save_seconds
from llmlaunch.planner.plan import Plan
from llmlaunch.recipe.types import Recipe

__all__ = ["progress_json"]

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
