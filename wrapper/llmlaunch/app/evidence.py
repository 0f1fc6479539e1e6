"""What measured runs and rehearsals say about a recipe's plans: nothing before the first run, and afterwards what the
store holds (`stored_evidence.py`)."""

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
    """Return what measured runs say about the recipe's plans: their memory, their step times, and how often they are
    stopped.

    Raises:
        UserError: the calibration that the recipe names does not exist, or belongs to another backend or accelerator.
    """
    needs_store = recipe.memory.risk is not None or recipe.memory.calibration not in (IN_USE, NO_CALIBRATION)
    if not needs_store and not _has_store():
        return Lessons(support=unmeasured_support(recipe))
    from llmlaunch.app.stored_evidence import stored_lessons

    return stored_lessons(recipe, notify)


def with_own_layouts(setting: Setting, notify: Notify) -> Setting:
    """Return the setting with what earlier runs of this job, and rehearsals, showed about its layouts. A run takes
    precedence over a rehearsal. The setting is unchanged if the recipe uses no calibration. If the store cannot be
    read, there is one warning."""
    if setting.recipe.memory.calibration == NO_CALIBRATION or not _has_store():
        return setting
    from llmlaunch.app.stored_evidence import with_stored_layouts

    return with_stored_layouts(setting, notify)


def last_true_peaks(recipe: Recipe, notify: Notify) -> PastRun | None:
    """Return the latest measured run of this recipe or of another version of it, or None. The store is opened only if
    it has such a run. If it cannot be read, there is a warning."""
    if not _has_store():
        return None
    from llmlaunch.app.stored_evidence import stored_peaks

    return stored_peaks(recipe, notify)


def _has_store() -> bool:
    """Return whether there is a store to read. A variable that names no valid store is refused later, where it is
    read."""
    try:
        return existing_store() is not None
    except UserError:
        return True
