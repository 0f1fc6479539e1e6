"""What a person wrote beside the plan may add to it, never contradict it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from llmlaunch.backends.base import NodeVariable
from llmlaunch.errors import UserError
from llmlaunch.recipe.types import Recipe

__all__ = ["merged_environment", "refuse_repeats"]


def refuse_repeats(recipe: Recipe, planned: Iterable[str | NodeVariable]) -> None:
    """Raises UserError where `backend.extra_args` repeats a flag that is planned."""
    mine = {word for word in planned if isinstance(word, str) and word.startswith("--")}
    for word in recipe.backend.extra_args:
        flag = word.split("=", 1)[0]
        if flag in mine:
            raise UserError(
                f"{recipe.path}: backend.extra_args: {flag} is planned by llmlaunch already; say it in the recipe "
                "(layout, training, model) and remove it there"
            )


def merged_environment(
    recipe: Recipe, wanted: Mapping[str, str], required: Mapping[str, str], because: str
) -> dict[str, str]:
    """Our variables, those of `wanted` as the recipe sets them where it does.

    Raises UserError where the recipe sets one of `required` to something else; `because` says what needs it.
    """
    for name, value in required.items():
        given = recipe.environment.get(name)
        if given is not None and given != value:
            raise UserError(
                f"{recipe.path}: environment.{name}: is {given!r}, but {because} needs {value!r}; remove the line"
            )
    return {**wanted, **required, **{k: v for k, v in recipe.environment.items() if k in wanted}}
