"""The layouts that take over where a device runs out of memory, for a person."""

from __future__ import annotations

from llmlaunch.planner.plan import Fallback, Plan
from llmlaunch.recipe.types import Recipe
from llmlaunch.report.text import table
from llmlaunch.units import gib

__all__ = ["fallback_text"]

AFTER_CHECKPOINT = {
    "reshard": "before the first checkpoint only: cannot load one",
    "restart": "from step 0, in a checkpoint folder of its own",
    "stop": "before the first checkpoint only",
}


def fallback_text(recipe: Recipe, plan: Plan) -> list[str]:
    """One line each, and why there are fewer than asked for; nothing where the recipe asks for none."""
    found = plan.fallbacks
    if found is None:
        return []
    if not found.layouts:
        return ["", str(found.missing)]
    head, *rows = table(
        ["", "GiB worst rank", "s/step", ""], [_row(plan, number, one) for number, one in enumerate(found.layouts, 1)]
    ).splitlines()
    notes = (_after_checkpoint(recipe, one) for one in found.layouts)
    lines = [f"{row}  {note}".rstrip() for row, note in zip(rows, notes, strict=True)]
    title = "Where a device runs out of memory, the same job goes on with"
    return ["", title, head, *lines, *([found.missing] if found.missing else [])]


def _row(plan: Plan, number: int, fallback: Fallback) -> list[str]:
    chosen = fallback.plan.chosen
    slower = chosen.step_seconds / plan.chosen.step_seconds - 1.0
    figures = [gib(chosen.device_bytes), f"{chosen.step_seconds:.2f}", f"{slower:+.1%}"]
    return [f"{number}. {chosen.describe()}", *figures]


def _after_checkpoint(recipe: Recipe, fallback: Fallback) -> str:
    """What becomes of checkpoints there may be by then."""
    if recipe.training.checkpoint_path is None:
        return ""
    asked = recipe.on_oom.after_checkpoint
    if any(fallback.loads) and asked != "stop":
        whose = (f"{place}." if place else "the planned layout" for place, able in enumerate(fallback.loads) if able)
        return "from the last checkpoint" if all(fallback.loads) else f"from a checkpoint of {' or '.join(whose)}"
    return AFTER_CHECKPOINT[asked]
