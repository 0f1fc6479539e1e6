"""What earlier runs of a recipe really used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmlaunch.app.evidence import Notify
from llmlaunch.errors import UserError
from llmlaunch.recipe.types import Recipe
from llmlaunch.store.location import store_exists, where

if TYPE_CHECKING:
    from llmlaunch.store.history import PastRun

__all__ = ["last_true_peaks"]


def last_true_peaks(recipe: Recipe, notify: Notify) -> PastRun | None:
    """Return the last measured run of this recipe, or of another version of it; None where there is none. The store is
    opened only where it has such a run; one that cannot be read is a warning."""
    place = where()
    if not store_exists(place):
        return None
    from llmlaunch.store.reading import has_runs_of

    if not has_runs_of(place, recipe.digest, recipe.name):
        return None
    from llmlaunch.store import history
    from llmlaunch.store.collect import open_collected

    try:
        with open_collected(notify) as store:
            return history.last_true_peaks(store, recipe.digest, recipe.name)
    except UserError as failure:
        notify(f"warning: earlier runs are not shown: {failure}")
        return None
