"""Pins against the whole space: which layouts keep which pins, and how far the others are from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmlaunch.layout import RECOMPUTE_NAMES
from llmlaunch.planner.enumerate import offered_values
from llmlaunch.planner.search import Found
from llmlaunch.planner.setting import Setting
from llmlaunch.planner.variants import as_ints
from llmlaunch.recipe.types import Recipe

__all__ = ["Widened", "as_pin", "freed", "widened"]

KINDS = frozenset({"sequence_parallel", "zero_stage", "recompute"})
AMOUNTS = frozenset({"recompute_layers", "offload_layers"})  # 0 is none of them


@dataclass(frozen=True)
class Widened:
    """The legal layouts where every pin may also be what it is not, `kept[i, j]` says whether layout i keeps pin j, and
    `distance` how far it is from those it does not: in powers of two for a size, in steps for a kind."""

    setting: Setting
    found: Found
    names: tuple[str, ...]
    kept: NDArray[np.bool_]
    distance: NDArray[np.float64]

    def nearest_safe(self) -> int | None:
        """The row of the safe layout that changes the fewest pins, then the least, then the fastest."""
        ranked = self.found.order[self.found.safe[self.found.order]]
        if not len(ranked):
            return None
        changed = np.count_nonzero(~self.kept[ranked], axis=1)
        return int(ranked[np.lexsort((np.arange(len(ranked)), np.round(self.distance[ranked], 9), changed))[0]])

    def conflict(self) -> tuple[str, ...] | None:
        """The smallest set of pins that no legal layout keeps together; None where there is none, and empty where no
        layout is legal whatever the pins."""
        bits = np.unique(self.kept @ (1 << np.arange(len(self.names), dtype=np.int64)))
        kept = (bits[:, None] >> np.arange(len(self.names))) % 2 == 1
        for size in range(len(self.names) + 1):
            for some in combinations(range(len(self.names)), size):
                if not kept[:, list(some)].all(axis=1).any():
                    return tuple(self.names[j] for j in some)
        return None

    def legal_values(self, name: str) -> list[int]:
        """What pin `name` might be for a legal layout that keeps all other pins."""
        others = [j for j, other in enumerate(self.names) if other != name]
        rows = self.kept[:, others].all(axis=1)
        return sorted(set(getattr(self.found.layouts, name)[rows].tolist()))

    def changes(self, row: int) -> dict[str, int]:
        """The pins layout `row` does not keep, with its values, in the order of the recipe."""
        layouts = self.found.layouts
        lost = (name for name, kept in zip(self.names, self.kept[row], strict=True) if not kept)
        return {name: int(getattr(layouts, name)[row]) for name in lost}


def widened(setting: Setting) -> Widened:
    """Search as if there were no pins; what they name is searched beside what the backend offers."""
    found = setting.of(freed(setting)).search()
    pins = setting.recipe.pins
    columns = [_off(name, as_ints(name, pin), getattr(found.layouts, name)) for name, pin in pins.items()]
    off = np.array(columns, dtype=np.float64).reshape(len(pins), len(found.layouts)).T
    return Widened(setting, found, tuple(pins), np.equal(off, 0.0), off.sum(axis=1))


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
    """How far each value is from the nearest wanted one."""
    mine, theirs = column[:, None].astype(np.float64), np.array(wanted, dtype=np.float64)
    if name in AMOUNTS:
        mine, theirs = mine + 1.0, theirs + 1.0
    away = np.abs(mine - theirs if name in KINDS else np.log2(mine) - np.log2(theirs))
    nearest: NDArray[np.float64] = away.min(axis=1)
    return nearest
