"""Fewer nodes on which a step is shorter than on those the recipe asks for, because it waits for the network between
them. A few layouts are priced, those nearest to the planned one; nothing is searched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from llmlaunch.layout import Layout
from llmlaunch.planner.changes import safe_layouts
from llmlaunch.planner.plan import FasterOnFewer, Plan, as_planned
from llmlaunch.planner.search_space import pinned_numbers
from llmlaunch.planner.setting import Setting
from llmlaunch.recipe.types import Recipe

DIVISORS = (2, 4, 8, 16, 32)  # of the number of nodes
SIZES = ("data", "context", "pipeline")  # one of which spans fewer nodes, the first that does costs least
LEAST_GAIN = 0.02  # what a model of time can tell apart


def faster_on_fewer(setting: Setting, plan: Plan, network_share: float) -> FasterOnFewer | None:
    """Return the number of nodes, fewer than the recipe's, and the safe layout with the shortest step on them; None
    where no layout near the planned one, whose step waits for the network for a share of its time, is shorter."""
    recipe, seconds = setting.recipe, plan.chosen.step_seconds
    best: FasterOnFewer | None = None
    for nodes in _fewer(recipe.nodes):
        changed = replace(as_planned(recipe, plan.chosen), nodes=nodes)
        smaller = list(_smaller(recipe, plan.layout, recipe.nodes // nodes))
        for taken, layout in safe_layouts(setting, changed, smaller):
            if taken < (best.step_seconds if best else seconds):
                best = FasterOnFewer(nodes, taken, layout, network_share)
    return best if best is not None and best.step_seconds < (1.0 - LEAST_GAIN) * seconds else None


def _fewer(nodes: int) -> list[int]:
    """Return smaller numbers of nodes that divide this one, the largest first."""
    fewer = {nodes // divisor for divisor in DIVISORS if nodes % divisor == 0}
    return sorted(fewer | ({1} if nodes > 1 else set()), reverse=True)


def _smaller(recipe: Recipe, layout: Layout, divisor: int) -> Iterator[Layout]:
    """Yield the layouts that differ in one size, which is smaller by the divisor and which no pin forbids."""
    for name in SIZES:
        size, pinned = getattr(layout, name), pinned_numbers(recipe, name)
        even = name != "pipeline" or not (layout.uneven or recipe.layers_by_stage)
        if even and size % divisor == 0 and (not pinned or size // divisor in pinned):
            yield replace(layout, **{name: size // divisor})
