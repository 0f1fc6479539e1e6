"""What the store's rehearsals say of a recipe's layouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from llmlaunch.backends.registry import recorded_name
from llmlaunch.cli.printed import warn_once
from llmlaunch.errors import UserError
from llmlaunch.recipe.types import NO_CALIBRATION

if TYPE_CHECKING:
    from llmlaunch.planner.setting import Setting

__all__ = ["with_rehearsals"]


def with_rehearsals(setting: Setting) -> Setting:
    """Return the setting with the rehearsals that the store holds of the recipe's own layouts. A recipe without
    calibration takes none of these either. A store that cannot be read is a warning: planning goes on without it."""
    recipe = setting.recipe
    if recipe.memory.calibration == NO_CALIBRATION:
        return setting
    try:
        contents = _contents(recorded_name(recipe))
    except UserError as failure:
        warn_once([f"rehearsals are not used: {failure}"])
        return setting
    if not contents:
        return setting
    from llmlaunch.rehearsal.earlier import rehearsals_of

    rehearsals = rehearsals_of([json.loads(text) for text in contents], setting)
    return replace(setting, lessons=replace(setting.lessons, rehearsals=rehearsals))


def _contents(backend: str) -> Sequence[str]:
    """The records of all rehearsals with a backend. The database library is imported for a server alone, and for a file
    that it may mend or explain."""
    from llmlaunch.store.location import store_exists, where

    place = where()
    if not store_exists(place):
        return []
    if place.path is not None:
        import sqlite3

        from llmlaunch.store.sqlite_file import rehearsals_in_file

        try:
            return rehearsals_in_file(place.path, backend)
        except sqlite3.Error as error:
            if "locked" in str(error):
                raise UserError(f"store {place.shown} is in use by another program ({error})") from None
    from llmlaunch.store.database import open_store
    from llmlaunch.store.measurements import Filters, contents

    with open_store(place) as store:
        return contents(store, Filters(family="rehearsed", backend=backend))
