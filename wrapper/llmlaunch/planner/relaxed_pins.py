"""Pins against the whole space: which layouts keep which pins, and how far the others are from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.layout import AMOUNTS, RECOMPUTE_LAYERS, RECOMPUTE_NAMES
from llmlaunch.planner.search import SearchResult, search
from llmlaunch.planner.search_space import as_ints, searched_values
from llmlaunch.planner.setting import Setting
from llmlaunch.recipe.types import Recipe

__all__ = ["RelaxedSearch", "as_pin", "pin_distance", "relax_pins", "search_relaxed"]

KINDS = frozenset({"sequence_parallel", "zero_stage", "recompute"})


@dataclass(frozen=True)
class RelaxedSearch:
    """The legal layouts of a search in which every pin may also take other values. Bit j of `kept_pins` says whether a
    layout keeps pin j, and `distance` how far it is from the pins it breaks: in powers of two for a size, in steps for
    a kind."""

    setting: Setting
    result: SearchResult
    names: tuple[str, ...]
    kept_pins: IntColumn
    distance: FloatColumn

    def nearest_safe(self) -> int | None:
        """Return the safe layout that changes the fewest pins, then the least, then the fastest."""
        safe = np.flatnonzero(self.result.safe)
        if not len(safe):
            return None
        bit_counts = np.array([bin(bits).count("1") for bits in range(1 << len(self.names))])
        count = bit_counts[self.kept_pins[safe]]
        safe = safe[count == count.max()]
        far = np.round(self.distance[safe], 9)
        safe = safe[far == far.min()]
        return int(safe[np.argmin(self.result.preferred_seconds[safe])])

    def changes(self, row: int) -> dict[str, int]:
        """Return the pins that layout `row` breaks, with its values, in the order of the recipe."""
        broken = [name for j, name in enumerate(self.names) if not self.kept_pins[row] >> j & 1]
        return {name: int(self.result.points.column(name)[row]) for name in broken}


def search_relaxed(setting: Setting) -> RelaxedSearch:
    """Search as if there were no pins; the values they name are searched beside what the backend offers."""
    result = search(setting.with_recipe(relax_pins(setting)), whole=True)
    pins = setting.recipe.pins
    kept, distance = np.zeros(len(result.points), dtype=np.int64), np.zeros(len(result.points))
    for j, (name, pin) in enumerate(pins.items()):
        off = pin_distance(name, as_ints(name, pin), result.points.column(name))
        kept |= np.equal(off, 0.0).astype(np.int64) << j
        distance += off
    return RelaxedSearch(setting, result, tuple(pins), kept, distance)


def relax_pins(setting: Setting, keep: Iterable[str] = ()) -> Recipe:
    """Return the recipe with every pin but those of `keep` replaced by all that pin and backend offer together."""
    recipe = setting.recipe
    space = setting.backend.space(recipe)
    pins: dict[str, Any] = {name: pin for name, pin in recipe.pins.items() if name in keep}
    for name in recipe.pins.keys() - pins.keys() - {"data"}:  # data follows from the others
        values = dict.fromkeys((*as_ints(name, recipe.pins[name]), *searched_values(recipe, space, name)))
        pins[name] = tuple(RECOMPUTE_NAMES[value] if name == "recompute" else value for value in values)
    return replace(recipe, pins=pins)


def as_pin(name: str, value: int) -> int | bool | str | None:
    """Return a number of a layout as a recipe writes it; None where the recipe writes nothing."""
    if name == "recompute":
        return RECOMPUTE_NAMES[value]
    if name == RECOMPUTE_LAYERS and not value:
        return None
    return bool(value) if name == "sequence_parallel" else value


def pin_distance(name: str, pinned: tuple[int, ...], column: IntColumn) -> FloatColumn:
    """Return how far each value is from the nearest pinned one. Values are small: each is measured once."""
    values = np.arange(column.max(initial=0) + 1, dtype=np.float64)[:, None]
    targets = np.array(pinned, dtype=np.float64)
    if name in KINDS:
        away = np.abs(values - targets)
    else:
        none = 1.0 if name in AMOUNTS else 0.0
        away = np.abs(np.log2(np.maximum(values, 1.0 - none) + none) - np.log2(targets + none))
    nearest: FloatColumn = away.min(axis=1)[column]
    return nearest
