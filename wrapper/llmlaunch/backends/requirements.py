"""What a backend needs of a recipe whatever the layout, as data: a technique without a flag is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llmlaunch.errors import UserError
from llmlaunch.recipe.types import Recipe

__all__ = ["Requirement", "pinned_least", "refuse_unmet", "refuse_what_ifs"]


@dataclass(frozen=True)
class Requirement:
    """`broken(recipe)` is True where the recipe asks for what the backend cannot do. `recipe_key` is the key to mend,
    `sentence` says why and the way out, `where` names the place that was read, with its version."""

    key: str
    recipe_key: str
    sentence: str
    where: str
    broken: Callable[[Recipe], bool]


def pinned_least(recipe: Recipe, name: str) -> int:
    """The smallest number a pin of the layout allows; 0 where it is free."""
    pin = recipe.pins.get(name, 0)
    return min(int(value) for value in (pin if isinstance(pin, tuple) else (pin,)))


def refuse_unmet(recipe: Recipe, requirements: Iterable[Requirement]) -> None:
    """Raises UserError for the first requirement a recipe breaks."""
    for requirement in requirements:
        if requirement.broken(recipe):
            raise UserError(f"{recipe.path}: {requirement.recipe_key}: {requirement.sentence} ({requirement.where})")


def refuse_what_ifs(recipe: Recipe) -> None:
    """Raises UserError where a run is to be rendered with techniques that can only be priced."""
    asked = recipe.techniques.what_ifs
    if asked:
        raise UserError(
            f"{recipe.path}: what_if.{asked[0]}: no backend runs it; check and plan price it; remove it to render"
        )
