"""What a backend needs of a recipe whatever the layout, as data, and helpers that rules over layouts share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from llmlaunch.columns import BoolColumn
from llmlaunch.errors import UserError
from llmlaunch.recipe.types import Recipe

__all__ = ["Requirement", "implies", "pinned_least", "refuse_unmet", "refuse_what_ifs"]


@dataclass(frozen=True)
class Requirement:
    """One thing a backend cannot do: `broken(recipe)` is True where the recipe asks for it.

    `recipe_key` is the key to change, `sentence` gives the reason and the way out, and `where` names the framework file
    (with its version) that was read.
    """

    key: str
    recipe_key: str
    sentence: str
    where: str
    broken: Callable[[Recipe], bool]


def implies(condition: BoolColumn | bool, consequence: BoolColumn | bool) -> BoolColumn:
    """Return True for each layout where `condition` does not hold, or `consequence` does: how a rule with a premise
    is written over the columns of all layouts."""
    column: BoolColumn = np.logical_or(np.logical_not(condition), consequence)
    return column


def pinned_least(recipe: Recipe, name: str) -> int:
    """Return the smallest number that the pin `name` of the layout allows, or 0 where the layout leaves it free."""
    pin = recipe.pins.get(name, 0)
    return min(int(value) for value in (pin if isinstance(pin, tuple) else (pin,)))


def refuse_unmet(recipe: Recipe, requirements: Iterable[Requirement]) -> None:
    """Raise UserError for the first requirement that the recipe breaks."""
    for requirement in requirements:
        if requirement.broken(recipe):
            raise UserError(f"{recipe.path}: {requirement.recipe_key}: {requirement.sentence} ({requirement.where})")


def refuse_what_ifs(recipe: Recipe) -> None:
    """Raise UserError where a recipe that is to be rendered asks for techniques that can only be priced."""
    what_ifs = recipe.techniques.what_ifs
    if what_ifs:
        raise UserError(
            f"{recipe.path}: what_if.{what_ifs[0]}: no backend runs it; check and plan price it; remove it to render"
        )
