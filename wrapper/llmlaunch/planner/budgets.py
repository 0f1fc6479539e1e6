"""How much of a recipe's budget a job takes."""

from __future__ import annotations

from llmlaunch.planner.plan import JobLength
from llmlaunch.recipe.types import Budget
from llmlaunch.units import DAY

DAYS, GPU_HOURS = "days", "gpu_hours"


def budget_shares(budget: Budget, length: JobLength) -> dict[str, float]:
    """Map each limited key of the budget to the share of it that the job takes."""
    needed = {DAYS: length.seconds / DAY, GPU_HOURS: length.gpu_hours}
    allowed = {DAYS: budget.days, GPU_HOURS: budget.gpu_hours}
    return {key: needed[key] / most for key, most in allowed.items() if most is not None}


def most_exceeded(budget: Budget, length: JobLength) -> str | None:
    """Return the key of the budget that the job exceeds most; None where it stays within."""
    over = {key: share for key, share in budget_shares(budget, length).items() if share > 1.0}
    return max(over, key=lambda key: over[key]) if over else None
