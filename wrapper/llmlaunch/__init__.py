"""llmlaunch: from a recipe to a running job, and from its measured peak back to a better estimate.

The public Python interface (docs/python.md): what the `llmlaunch` command does, as functions that return objects. Names
are imported when they are first used, so that `import llmlaunch` takes no time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmlaunch.app.planned_run import MemoryEstimate, PlannedRun, estimate, plan, render
    from llmlaunch.app.stored_runs import Measurement, RunState, measurements, runs
    from llmlaunch.app.submission import SubmittedRun, submit
    from llmlaunch.errors import NothingSafe, NoVerdict, SchedulerRefused, UserError
    from llmlaunch.recipe.load import load_recipe
    from llmlaunch.recipe.types import Recipe

__version__ = "0.1.0"

__all__ = [
    "Measurement",
    "MemoryEstimate",
    "NoVerdict",
    "NothingSafe",
    "PlannedRun",
    "Recipe",
    "RunState",
    "SchedulerRefused",
    "SubmittedRun",
    "UserError",
    "estimate",
    "load_recipe",
    "measurements",
    "plan",
    "render",
    "runs",
    "submit",
]

_HOMES = {
    "app.planned_run": ("MemoryEstimate", "PlannedRun", "estimate", "plan", "render"),
    "app.stored_runs": ("Measurement", "RunState", "measurements", "runs"),
    "app.submission": ("SubmittedRun", "submit"),
    "errors": ("NoVerdict", "NothingSafe", "SchedulerRefused", "UserError"),
    "recipe.load": ("load_recipe",),
    "recipe.types": ("Recipe",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
