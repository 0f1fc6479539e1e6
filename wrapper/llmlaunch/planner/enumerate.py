"""Every layout a recipe could mean: the product of the backend's values, narrowed by the person's pins."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from llmlaunch.backends.base import Space
from llmlaunch.layout import EVEN, LAYOUT_FIELDS, RECOMPUTE_NAMES, LayoutColumns
from llmlaunch.recipe.types import Recipe

__all__ = ["as_ints", "enumerate_layouts", "offered_values"]

MOST_CONTEXT = 64
MOST_MICRO_BATCH = 64


def divisors(n: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, n + 1) if n % d == 0)


def powers_of_two(limit: int) -> tuple[int, ...]:
    return tuple(1 << i for i in range(max(limit, 1).bit_length()))


def enumerate_layouts(recipe: Recipe, space: Space) -> LayoutColumns:
    """All combinations; data parallelism is what the others leave of the world size.

    Combinations whose product does not divide the world size are no layouts at all and are left out; whatever else
    is wrong with one is for the backend's rules to say.
    """
    axes = {name: np.array(_values(recipe, space, name), dtype=np.int64) for name in LAYOUT_FIELDS if name != "data"}
    grid = np.meshgrid(*axes.values(), indexing="ij", copy=False)
    columns = {name: column.ravel() for name, column in zip(axes, grid, strict=True)}
    split = columns["tensor"] * columns["pipeline"] * columns["context"]
    whole = (recipe.world_size % split) == 0
    columns = {name: column[whole] for name, column in columns.items()}
    even = np.zeros(np.count_nonzero(whole), dtype=np.int64)
    layouts = LayoutColumns(data=recipe.world_size // split[whole], partition=even, partitions=EVEN, **columns)
    wanted = recipe.pins.get("data")
    if wanted is None:
        return layouts
    return layouts.take(np.isin(layouts.data, np.array(as_ints("data", wanted))))


def _values(recipe: Recipe, space: Space, name: str) -> Iterable[int]:
    pinned = recipe.pins.get(name)
    return offered_values(recipe, space, name) if pinned is None else as_ints(name, pinned)


def offered_values(recipe: Recipe, space: Space, name: str) -> tuple[int, ...]:
    """What a layout field may be where nobody pins it; `data` follows from the others."""
    offered: tuple[int, ...] = getattr(space, name, ())
    if offered:
        return offered
    shape, world = recipe.model, recipe.world_size
    if name == "micro_batch_size":
        return powers_of_two(min(MOST_MICRO_BATCH, recipe.workload.global_batch_size))
    if name == "context":
        return powers_of_two(min(MOST_CONTEXT, world))
    if name in ("recompute_layers", "offload_layers"):
        return (0,)
    if name == "expert":
        return divisors(shape.moe.num_experts) if shape.moe else (1,)
    return tuple(d for d in divisors(shape.num_layers) if name == "virtual_pipeline" or d <= world)


def as_ints(name: str, pinned: object) -> tuple[int, ...]:
    """The values a pin allows, as numbers of a layout."""
    values = pinned if isinstance(pinned, tuple) else (pinned,)
    if name == "recompute":
        return tuple(RECOMPUTE_NAMES.index(str(v)) for v in values)
    return tuple(int(v) for v in values)
