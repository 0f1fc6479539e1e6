"""What was rehearsed among the layouts of a search: a rehearsal goes before the estimate, both ways."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from llmlaunch.calibration.lessons import Rehearsal
from llmlaunch.layout import LAYOUT_FIELDS, Layout
from llmlaunch.planner.plan import Limit
from llmlaunch.planner.points import Points
from llmlaunch.planner.variants import recipe_with
from llmlaunch.recipe.types import Recipe

__all__ = ["REHEARSED", "lifts", "refutable", "rehearsal_of", "rehearsed_points"]

REHEARSED = "rehearsed"  # why a layout is refused


def rehearsed_points(rehearsals: Iterable[Rehearsal], recipe: Recipe, points: Points) -> Mapping[int, Rehearsal]:
    """By their place among `points` the layouts that were rehearsed as they are, with the same words and workload."""
    found: dict[int, Rehearsal] = {}
    for one in rehearsals:
        for row in np.flatnonzero(_split_alike(points, one.layout)[points.rows.split]):
            said = recipe_with(recipe, *points.words(int(row)))
            if points.layout(int(row)) == one.layout and _says(said, one):
                found[int(row)] = one
    return found


def rehearsal_of(rehearsals: Iterable[Rehearsal], recipe: Recipe, layout: Layout) -> Rehearsal | None:
    """That of one layout, with the words that `recipe` says."""
    return next((one for one in rehearsals if one.layout == layout and _says(recipe, one)), None)


def lifts(one: Rehearsal, limit: Limit) -> bool:
    """Whether it lets pass what the estimate refuses. Where less of a device may be filled than when it was judged, as
    for a layout to fall back on, it does not."""
    return one.safe and limit.limit_bytes >= one.limit_bytes


def refutable(rehearsals: Iterable[Rehearsal], recipe: Recipe) -> int:
    """At most how many layouts of the recipe's search a rehearsal refuses."""
    mine = (one for one in rehearsals if one.layout.world_size == recipe.world_size)
    return sum(not one.safe and one.workload == recipe.workload for one in mine)


def _says(recipe: Recipe, one: Rehearsal) -> bool:
    words = recipe.techniques, recipe.training.gradient_dtype
    return recipe.workload == one.workload and words == (one.techniques, one.gradient_dtype)


def _split_alike(points: Points, layout: Layout) -> NDArray[np.bool_]:
    """Of the splits those of its sizes: few of millions of points are looked at one by one."""
    splits = points.splits
    alike = np.ones(len(splits), dtype=np.bool_)
    for name in LAYOUT_FIELDS:
        if name not in ("zero_stage", "recompute", "recompute_layers", "offload_layers"):
            alike &= np.equal(getattr(splits, name), getattr(layout, name))
    return alike
