"""What measured runs and rehearsals say of a recipe's plans: nothing before a first run, else what the store holds
(`stored_evidence.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmlaunch.app.messages import Notify
from llmlaunch.calibration.lessons import Lessons, unmeasured_support
from llmlaunch.errors import UserError
from llmlaunch.recipe.types import IN_USE, NO_CALIBRATION, Recipe
from llmlaunch.store.location import existing_store

if TYPE_CHECKING:
    from llmlaunch.planner.setting import Setting
    from llmlaunch.store.history import PastRun


def lessons_of(recipe: Recipe, notify: Notify) -> Lessons:
    """Return what measured runs say of the recipe's plans: of their memory and step times, and of how often they are
    stopped.

    Raises:
        UserError: the calibration that the recipe names does not exist, or is of another backend or accelerator.
    """
    asked = recipe.memory.risk is not None or recipe.memory.calibration not in (IN_USE, NO_CALIBRATION)
    if not asked and not _has_store():
        return Lessons(support=unmeasured_support(recipe))
    from llmlaunch.app.stored_evidence import stored_lessons

    return stored_lessons(recipe, notify)


def with_own_layouts(setting: Setting, notify: Notify) -> Setting:
    """Return the setting with what runs of this very job, and rehearsals, showed of its own layouts, a run before a
    rehearsal; unchanged where the recipe takes no calibration. A store that cannot be read is one warning."""
    if setting.recipe.memory.calibration == NO_CALIBRATION or not _has_store():
        return setting
    from llmlaunch.app.stored_evidence import with_stored_layouts

    return with_stored_layouts(setting, notify)


def last_true_peaks(recipe: Recipe, notify: Notify) -> PastRun | None:
    """Return the last measured run of this recipe, or of another version of it; None where there is none. The store is
    opened only where it has such a run; one that cannot be read is a warning."""
    if not _has_store():
        return None
    from llmlaunch.app.stored_evidence import stored_peaks

    return stored_peaks(recipe, notify)


def _has_store() -> bool:
    """Return whether the store is to be read; a variable that names none is refused where it is read."""
    try:
        return existing_store() is not None
    except UserError:
        return True
