"""A change of a recipe: what to write, and the recipe that says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

from llmlaunch.layout import Layout
from llmlaunch.planner.pins import AMOUNTS
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import NO_TECHNIQUES

__all__ = ["Change", "said", "said_at", "unfixed", "with_word", "without"]


@dataclass(frozen=True)
class Change:
    """`settings` are what to write, by dotted key; None takes the key away. `recipe` is the recipe so changed and
    `layout` the fastest safe one of it. `before` holds what was there of the keys that change."""

    settings: Mapping[str, Any]
    recipe: Recipe
    layout: Layout
    before: Mapping[str, Any] = field(default_factory=dict)

    def sentence(self) -> str:
        """`set layout.tensor: 8 (from 4) and layout.data: 4 (from 8)`, as one clause."""
        words = [self._clause(key, value) for key, value in self.settings.items()]
        runs = (f"{verb} {' and '.join(what for _, what in run)}" for verb, run in groupby(words, key=itemgetter(0)))
        return " and ".join(runs)

    def _clause(self, key: str, value: Any) -> tuple[str, str]:
        if value is None:
            return "remove", key
        if key not in self.before:
            return "add", f"{key}: {said(value)}"
        return "set", f"{key}: {said(value)} (from {said(self.before[key])})"


def said(value: Any) -> str:
    """A value as YAML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"[{', '.join(map(said, value))}]" if isinstance(value, (list, tuple)) else str(value)


def unfixed(recipe: Recipe, name: str) -> Recipe:
    """The recipe with this word left for the planner to choose."""
    return replace(recipe, fixed=tuple(word for word in recipe.fixed if word != name))


def said_at(recipe: Recipe, name: str) -> Any:
    """What `layout:` says of a pin or technique; None where it says nothing."""
    if name in recipe.pins:
        return recipe.pins[name]
    value = getattr(recipe.techniques, name, None)
    return None if value == getattr(NO_TECHNIQUES, name, None) else value


def without(recipe: Recipe, name: str) -> Recipe:
    """A pin or a technique taken away."""
    if name in recipe.pins:
        return replace(recipe, pins={other: pin for other, pin in recipe.pins.items() if other != name})
    none: dict[str, Any] = {name: getattr(NO_TECHNIQUES, name)}
    return replace(unfixed(recipe, name), techniques=replace(recipe.techniques, **none))


def with_word(recipe: Recipe, name: str, value: Any) -> Recipe:
    """A number of layers pinned, or a technique said."""
    if name in AMOUNTS:
        return replace(recipe, pins={**recipe.pins, name: value})
    held: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value}
    fixed = tuple(dict.fromkeys((*recipe.fixed, name)))
    return replace(recipe, techniques=replace(recipe.techniques, **held), fixed=fixed)
