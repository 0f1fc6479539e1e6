"""Pins against the whole space: which layouts keep which pins, and how far the others are from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmlaunch.layout import RECOMPUTE_NAMES
from llmlaunch.planner.search import SearchResult, search
from llmlaunch.planner.search_space import as_ints, offered_values
from llmlaunch.planner.setting import Setting
from llmlaunch.recipe.types import Recipe

__all__ = ["Widened", "as_pin", "freed", "widened"]

KINDS = frozenset({"sequence_parallel", "zero_stage", "recompute"})
AMOUNTS = frozenset({"recompute_layers", "offload_layers"})  # 0 is none of them


@dataclass(frozen=True)
class Widened:
    """The legal layouts where every pin may also be what it is not. Bit j of `kept` says whether a layout keeps pin j,
    and `distance` how far it is from those it does not: in powers of two for a size, in steps for a kind."""

    setting: Setting
    found: SearchResult
    names: tuple[str, ...]
    kept: NDArray[np.int64]
    distance: NDArray[np.float64]

    def nearest_safe(self) -> int | None:
        """The safe layout that changes the fewest pins, then the least, then the fastest."""
        safe = np.flatnonzero(self.found.safe)
        if not len(safe):
            return None
        ones = np.array([bin(bits).count("1") for bits in range(1 << len(self.names))])
        kept = ones[self.kept[safe]]
        safe = safe[kept == kept.max()]
        far = np.round(self.distance[safe], 9)
        safe = safe[far == far.min()]
        return int(safe[np.argmin(self.found.step_seconds[safe])])

    def conflict(self) -> tuple[str, ...] | None:
        """The smallest set of pins that no legal layout keeps together; None where there is none, and empty where no
        layout is legal whatever the pins."""
        kept = np.unique(self.kept)
        for size in range(len(self.names) + 1):
            for some in combinations(range(len(self.names)), size):
                wanted = sum(1 << j for j in some)
                if not np.any((kept & wanted) == wanted):
                    return tuple(self.names[j] for j in some)
        return None

    def legal_values(self, name: str) -> list[int]:
        """What pin `name` might be for a legal layout that keeps all other pins."""
        others = (1 << len(self.names)) - 1 - (1 << self.names.index(name))
        return sorted(set(self.found.points.column(name)[(self.kept & others) == others].tolist()))

    def changes(self, row: int) -> dict[str, int]:
        """The pins layout `row` does not keep, with its values, in the order of the recipe."""
        lost = [name for j, name in enumerate(self.names) if not self.kept[row] >> j & 1]
        return {name: int(self.found.points.column(name)[row]) for name in lost}


def widened(setting: Setting) -> Widened:
    """Search as if there were no pins; what they name is searched beside what the backend offers."""
    found = search(setting.with_recipe(freed(setting)))
    pins = setting.recipe.pins
    kept, distance = np.zeros(len(found.points), dtype=np.int64), np.zeros(len(found.points))
    for j, (name, pin) in enumerate(pins.items()):
        off = _off(name, as_ints(name, pin), found.points.column(name))
        kept |= np.equal(off, 0.0).astype(np.int64) << j
        distance += off
    return Widened(setting, found, tuple(pins), kept, distance)


def freed(setting: Setting, keep: Iterable[str] = ()) -> Recipe:
    """The recipe with every pin but those of `keep` as wide as pin and backend together offer."""
    recipe = setting.recipe
    space = setting.backend.space(recipe)
    wide: dict[str, Any] = {name: pin for name, pin in recipe.pins.items() if name in keep}
    for name in recipe.pins.keys() - wide.keys() - {"data"}:  # data follows from the others
        values = dict.fromkeys((*as_ints(name, recipe.pins[name]), *offered_values(recipe, space, name)))
        wide[name] = tuple(RECOMPUTE_NAMES[value] if name == "recompute" else value for value in values)
    return replace(recipe, pins=wide)


def as_pin(name: str, value: int) -> int | bool | str | None:
    """A number of a layout as a recipe says it; None where it says so by silence."""
    if name == "recompute":
        return RECOMPUTE_NAMES[value]
    if name == "recompute_layers" and not value:
        return None
    return bool(value) if name == "sequence_parallel" else value


def _off(name: str, wanted: tuple[int, ...], column: NDArray[np.int64]) -> NDArray[np.float64]:
    """How far each value is from the nearest wanted one. No value is large: each is measured once, not each layout."""
    mine, theirs = np.arange(column.max(initial=0) + 1, dtype=np.float64)[:, None], np.array(wanted, dtype=np.float64)
    if name in KINDS:
        away = np.abs(mine - theirs)
    else:
        none = 1.0 if name in AMOUNTS else 0.0
        away = np.abs(np.log2(np.maximum(mine, 1.0 - none) + none) - np.log2(theirs + none))
    nearest: NDArray[np.float64] = away.min(axis=1)[column]
    return nearest
