"""What a recipe, or an override of the command line, writes at a key, and where."""

from __future__ import annotations

from collections.abc import Callable

from llmlaunch.documents.yaml_strict import Document, KeyPath, parse_document
from llmlaunch.frozen import frozen
from llmlaunch.recipe.types import Recipe


@frozen
class WrittenPin:
    """A pin as the recipe writes it: its dotted key, its place ("recipe.yaml:12"), and how a value is written."""

    key: str
    place: str
    value: Callable[[object], object]


def place_of(recipe: Recipe, path: KeyPath) -> str:
    """Return the place of the value at `path`, or of the nearest enclosing value that exists."""
    document = written_document(recipe)
    return recipe.path if document is None else document.where(path)


def written_pin(recipe: Recipe, name: str) -> WrittenPin:
    """Return how the recipe writes the pin `name`; it may write `zero_stage` 0 or 1 as `distributed_optimizer`."""
    document = written_document(recipe)
    layout = document.value.get("layout") if document is not None else None
    if name == "zero_stage" and isinstance(layout, dict) and layout.get("distributed_optimizer") is not None:
        return WrittenPin("layout.distributed_optimizer", place_of(recipe, ("layout", "distributed_optimizer")), bool)
    return WrittenPin(f"layout.{name}", place_of(recipe, ("layout", name)), lambda value: value)


def written_document(recipe: Recipe) -> Document | None:
    """Return the recipe as it was written, with the overrides of the command line, or None for one without a text."""
    if recipe.document is not None or not recipe.text:
        return recipe.document
    from llmlaunch.recipe.overrides import apply_overrides

    return apply_overrides(parse_document(recipe.text, recipe.path), recipe.overrides)
