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
    """Return the records of all rehearsals with a backend, as JSON texts."""
    from llmlaunch.store.location import store_exists, where
    from llmlaunch.store.reading import rehearsal_texts

    place = where()
    return rehearsal_texts(place, backend) if store_exists(place) else []
