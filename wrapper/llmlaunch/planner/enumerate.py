"""Every split a recipe could mean: the product of the backend's values, narrowed by the person's pins."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from llmlaunch.backends.base import Space
from llmlaunch.layout import EVEN, LAYOUT_FIELDS, LayoutColumns
from llmlaunch.planner.variants import pinned_numbers
from llmlaunch.recipe.types import Recipe

__all__ = ["MOST_CONTEXT", "SPLIT_FIELDS", "enumerate_splits", "enumerate_uneven", "offered_values"]

MOST_CONTEXT = 64
MOST_UNEVEN_CHUNKS = 8
MOST_MICRO_BATCH = 64
# Tried with every split (planner/variants.py).
WORDS = ("zero_stage", "recompute", "recompute_layers", "offload_layers")
SPLIT_FIELDS = tuple(name for name in LAYOUT_FIELDS if name not in WORDS)


def divisors(n: int, most: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, min(n, most) + 1) if n % d == 0)


def enumerate_splits(recipe: Recipe, space: Space) -> LayoutColumns:
    """All combinations of sizes; data parallelism is what the others leave of the world size, and the words of
    techniques are at their neutral values.

    Combinations whose product does not divide the world size are no layouts at all and are left out; whatever else
    is wrong with one is for the backend's rules to say.
    """
    pipelines, chunks = _values(recipe, space, "pipeline"), _values(recipe, space, "virtual_pipeline")
    named = recipe.layers_by_stage or ()
    split = () if len(set(named)) == 1 else named
    stages = [(p, v, split) for p, v in product(pipelines, chunks) if not named or p * v == len(named)]
    return _splits(recipe, space, stages)


def enumerate_uneven(recipe: Recipe, space: Space) -> LayoutColumns:
    """The same for stages that cannot be or need not be even, as nearly even as can be: a start for those who solve
    them. One chunk for each rank, whose ends may balance better; several where they do not divide the layers."""
    layers = recipe.model.num_layers
    if not space.uneven or recipe.layers_by_stage is not None:
        return _splits(recipe, space, [])
    pipelines = pinned_numbers(recipe, "pipeline") or divisors(recipe.world_size, layers)
    chunks = pinned_numbers(recipe, "virtual_pipeline") or range(1, MOST_UNEVEN_CHUNKS + 1)
    pairs = [(p, v) for p, v in product(pipelines, chunks) if p > 1 and p * v <= layers]
    return _splits(recipe, space, [(p, v, _nearly_even(layers, p * v)) for p, v in pairs if v == 1 or layers % (p * v)])


def _nearly_even(layers: int, stages: int) -> tuple[int, ...]:
    each, left = divmod(layers, stages)
    return tuple(each + (stages - left <= stage) for stage in range(stages))


def _splits(recipe: Recipe, space: Space, stages: Sequence[tuple[int, int, tuple[int, ...]]]) -> LayoutColumns:
    """All combinations of (pipeline, chunks, layers by stage) with the other sizes."""
    others = [name for name in SPLIT_FIELDS if name not in ("data", "pipeline", "virtual_pipeline")]
    axes = [np.arange(len(stages)), *(np.array(_values(recipe, space, name), dtype=np.int64) for name in others)]
    grid = [column.ravel() for column in np.meshgrid(*axes, indexing="ij", copy=False)]
    columns = dict(zip(others, grid[1:], strict=True))
    table = np.array([stage[:2] for stage in stages], dtype=np.int64).reshape(-1, 2)
    columns["pipeline"], columns["virtual_pipeline"] = table[grid[0]].T
    partitions = tuple(dict.fromkeys((*EVEN, *(split for _, _, split in stages))))
    columns["partition"] = np.array([partitions.index(split) for _, _, split in stages], dtype=np.int64)[grid[0]]
    split = columns["tensor"] * columns["pipeline"] * columns["context"]
    whole = (recipe.world_size % split) == 0
    columns = {name: column[whole] for name, column in columns.items()}
    zero = np.zeros(np.count_nonzero(whole), dtype=np.int64)
    layouts = LayoutColumns(
        data=recipe.world_size // split[whole], **columns, **dict.fromkeys(WORDS, zero), partitions=partitions
    )
    wanted = pinned_numbers(recipe, "data")
    return layouts.take(np.isin(layouts.data, np.array(wanted))) if wanted else layouts


def _values(recipe: Recipe, space: Space, name: str) -> tuple[int, ...]:
    return pinned_numbers(recipe, name) or offered_values(recipe, space, name)


def offered_values(recipe: Recipe, space: Space, name: str) -> tuple[int, ...]:
    """What a layout field may be where nobody pins it; `data` follows from the others."""
    if name == "zero_stage":
        return tuple(dict.fromkeys(held.zero_stage for held in space.state_techniques))
    if name in ("recompute", "recompute_layers", "offload_layers"):
        return tuple(dict.fromkeys(getattr(way, name) for way in space.step_techniques))
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
