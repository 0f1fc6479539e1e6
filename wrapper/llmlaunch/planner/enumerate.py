"""Every split a recipe could mean: the product of the backend's values, narrowed by the person's pins."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llmlaunch.backends.base import Space
from llmlaunch.layout import EVEN, LAYOUT_FIELDS, LayoutColumns
from llmlaunch.planner.variants import pinned_numbers
from llmlaunch.recipe.types import Recipe

__all__ = ["SPLIT_FIELDS", "enumerate_splits", "offered_values"]

MOST_CONTEXT = 64
MOST_MICRO_BATCH = 64
WORDS = (
    "zero_stage",
    "recompute",
    "recompute_layers",
    "offload_layers",
)  # tried with every split (planner/variants.py)
SPLIT_FIELDS = tuple(name for name in LAYOUT_FIELDS if name not in WORDS)


def divisors(n: int, most: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, min(n, most) + 1) if n % d == 0)


def enumerate_splits(recipe: Recipe, space: Space) -> LayoutColumns:
    """All combinations of sizes; data parallelism is what the others leave of the world size, and the words of
    techniques are at their neutral values.

    Combinations whose product does not divide the world size are no layouts at all and are left out; whatever else
    is wrong with one is for the backend's rules to say.
    """
    axes = {name: np.array(_values(recipe, space, name), dtype=np.int64) for name in SPLIT_FIELDS if name != "data"}
    grid = np.meshgrid(*axes.values(), indexing="ij", copy=False)
    columns = {name: column.ravel() for name, column in zip(axes, grid, strict=True)}
    split = columns["tensor"] * columns["pipeline"] * columns["context"]
    whole = (recipe.world_size % split) == 0
    columns = {name: column[whole] for name, column in columns.items()}
    zero = np.zeros(np.count_nonzero(whole), dtype=np.int64)
    layouts = LayoutColumns(
        data=recipe.world_size // split[whole],
        **columns,
        **dict.fromkeys(WORDS, zero),
        partition=zero,
        partitions=EVEN,
    )
    wanted = pinned_numbers(recipe, "data")
    layouts = layouts.take(np.isin(layouts.data, np.array(wanted))) if wanted else layouts
    return _with_stages(recipe.layers_by_stage, layouts) if recipe.layers_by_stage else layouts


def _with_stages(split: tuple[int, ...], layouts: LayoutColumns) -> LayoutColumns:
    """The layouts with as many stages as the person names, split so."""
    layouts = layouts.take(layouts.pipeline * layouts.virtual_pipeline == len(split))
    if len(set(split)) == 1:
        return layouts
    return replace(layouts, partition=np.ones_like(layouts.partition), partitions=(*EVEN, split))


def _values(recipe: Recipe, space: Space, name: str) -> tuple[int, ...]:
    return pinned_numbers(recipe, name) or offered_values(recipe, space, name)


def offered_values(recipe: Recipe, space: Space, name: str) -> tuple[int, ...]:
    """What a layout field may be where nobody pins it; `data` follows from the others."""
    if name == "zero_stage":
        return tuple(dict.fromkeys(held.zero_stage for held in space.held))
    if name in ("recompute", "recompute_layers", "offload_layers"):
        return tuple(dict.fromkeys(getattr(way, name) for way in space.running))
    offered: tuple[int, ...] = getattr(space, name, ())
    if offered:
        return offered
    shape, world = recipe.model, recipe.world_size
    if name == "micro_batch_size":
        return divisors(recipe.workload.global_batch_size, MOST_MICRO_BATCH)
    if name == "context":
        return divisors(world, MOST_CONTEXT)
    if name == "expert":
        return divisors(shape.moe.num_experts, shape.moe.num_experts) if shape.moe else (1,)
    stages = len(recipe.layers_by_stage or ()) or shape.num_layers
    return divisors(stages, stages if name == "virtual_pipeline" else world)
