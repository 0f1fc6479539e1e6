"""How many nodes: the fewest on which a safe layout exists that stays within the budget.

Safe on n nodes does not mean safe on n + 1, because sizes must divide; so counts are tried one after the other, from
the fewest. What cannot be split at all is known without pricing anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llmlaunch.memory.guard import IMPOSSIBLE_BYTES
from llmlaunch.planner.enumerate import MOST_CONTEXT, offered_values
from llmlaunch.planner.length import job_length
from llmlaunch.planner.plan import NO_LAYOUT, JobLength, Sizing, Tried
from llmlaunch.planner.rehearsed import REHEARSED
from llmlaunch.planner.search import BROKEN_ESTIMATE, HOST_MEMORY, MEMORY, Found
from llmlaunch.planner.setting import Setting
from llmlaunch.planner.variants import pinned_numbers
from llmlaunch.recipe.types import MOST_NODES, Budget, Recipe
from llmlaunch.timing.floor import least_device_seconds
from llmlaunch.units import DAY, GIB, duration

__all__ = [
    "DEFAULT_MOST_NODES",
    "beyond",
    "excess",
    "most_nodes",
    "said",
    "smallest_cluster",
    "sufficient",
]

DEFAULT_MOST_NODES = 1024
ALL_UP_TO = 64
AT_ONCE = 1024
DAYS, GPU_HOURS = "days", "gpu_hours"


def smallest_cluster(setting: Setting, fewest: int, most: int) -> Sizing:
    """The first count of nodes from `fewest` to `most` with a safe layout within the recipe's budget.

    Every count that can be split is tried up to ALL_UP_TO, and beyond it those at least a 32nd to a 64th above the last
    one that had a layout. What arithmetic alone would take beyond the budget is not searched, unless nothing else is
    safe: then the nearest of those is.
    """
    tried: list[Tried] = []
    searched = 0
    for nodes, can_split in _counts(setting, fewest, most):
        if not can_split:
            tried.append(Tried(nodes, NO_LAYOUT, _no_split(setting.recipe, nodes)))
        elif nodes == most or nodes - searched >= stride(nodes):
            sized = setting.of(replace(setting.recipe, nodes=nodes))
            tried.append(_hopeless(sized) or _try(sized))
            if tried[-1].refused is None:
                return Sizing(tuple(tried))
            searched = nodes if tried[-1].device_bytes is not None else searched
    return Sizing(_with_one_safe(setting, tried))


def stride(nodes: int) -> int:
    """How far apart counts are searched: 1 up to ALL_UP_TO, then 2 up to its double, 4 up to the next, and so on."""
    return 1 if nodes <= ALL_UP_TO else 2 ** ((nodes - 1).bit_length() - (ALL_UP_TO - 1).bit_length())


def _with_one_safe(setting: Setting, tried: Sequence[Tried]) -> tuple[Tried, ...]:
    """Where nothing searched is safe: those left unsearched for the budget, the nearest to it first, until one is."""
    found = {one.nodes: one for one in tried}
    unsearched = [one.nodes for one in tried if one.refused in (DAYS, GPU_HOURS) and one.length is None]
    if setting.recipe.budget.days is not None:
        unsearched.reverse()  # more nodes are faster, fewer cost less
    for nodes in unsearched if all(one.length is None for one in tried) else ():
        found[nodes] = _try(setting.of(replace(setting.recipe, nodes=nodes)))
        if found[nodes].length is not None:
            break
    return tuple(found.values())


def _counts(setting: Setting, fewest: int, most: int) -> Iterator[tuple[int, bool]]:
    """Each count, and whether it can be split; worked out as far as it is asked for."""
    for first in range(fewest, most + 1, AT_ONCE):
        counts = np.arange(first, min(first + AT_ONCE, most + 1))
        yield from zip(counts.tolist(), splittable(setting, counts).tolist(), strict=True)


def splittable(setting: Setting, counts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether all devices can be tensor x pipeline x context x data, so that heads, sequence and batch are shared out
    evenly: what every framework needs, whatever else it does."""
    recipe = setting.recipe
    # sizes are offered where they divide the devices: of so many nodes all do
    largest = setting.of(replace(recipe, nodes=math.lcm(*range(1, MOST_CONTEXT + 1))))
    tensor = _sharing(recipe.model.num_attention_heads, _values(largest, "tensor"))
    context = _sharing(recipe.workload.sequence_length, _values(largest, "context"))
    splits = np.unique(np.multiply.outer(np.multiply.outer(tensor, context), _pipelines(largest)))
    worlds = counts * recipe.cluster.devices_per_node
    data = np.where(worlds[:, None] % splits == 0, worlds[:, None] // splits, 0)
    pinned = pinned_numbers(recipe, "data")
    if pinned:
        data = np.where(np.isin(data, pinned), data, 0)
    whole = np.zeros(len(counts), dtype=np.bool_)
    for size in _values(largest, "micro_batch_size"):
        shared = recipe.workload.global_batch_size % np.maximum(data * size, 1) == 0
        whole |= np.any((data > 0) & shared, axis=1)
    return whole


def _pipelines(setting: Setting) -> NDArray[np.int64]:
    """Uneven stages need not divide the layers."""
    recipe = setting.recipe
    free = recipe.layers_by_stage is None and not pinned_numbers(recipe, "pipeline")
    if free and setting.backend.space(recipe).uneven:
        return np.arange(1, recipe.model.num_layers + 1)
    return _values(setting, "pipeline")


def _values(setting: Setting, name: str) -> NDArray[np.int64]:
    recipe = setting.recipe
    values = pinned_numbers(recipe, name) or offered_values(recipe, setting.backend.space(recipe), name)
    return np.array(values, dtype=np.int64)


def _sharing(whole: int, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    shares: NDArray[np.int64] = sizes[whole % sizes == 0]
    return shares


def _no_split(recipe: Recipe, nodes: int) -> str:
    pins = ", ".join(f"{name}={value}" for name, value in recipe.pins.items())
    kept = f" as pinned ({pins})" if pins else ""
    return (
        f"{nodes * recipe.cluster.devices_per_node} devices cannot be split{kept} so that they share heads, layers, "
        f"sequence and training.global_batch_size: {recipe.workload.global_batch_size} evenly"
    )


def _hopeless(setting: Setting) -> Tried | None:
    """What not even the arithmetic alone could do within the budget; None where it could."""
    recipe = setting.recipe
    if recipe.budget.days is None and recipe.budget.gpu_hours is None:
        return None
    least = job_length(recipe, least_device_seconds(setting.job, recipe.cluster) / recipe.world_size)
    over = beyond(recipe.budget, least)
    return None if over is None else Tried(recipe.nodes, over, f"its arithmetic alone takes {said(least, over)}")


def _try(setting: Setting) -> Tried:
    recipe, found = setting.recipe, setting.search()
    if not len(found.points):
        return Tried(recipe.nodes, NO_LAYOUT, _no_legal(found))
    best = found.candidate(recipe, 0)
    if not np.any(found.safe):
        rehearsed = found.rehearsed.get(int(found.first[0]))
        if rehearsed is not None and not rehearsed.safe:
            return Tried(recipe.nodes, REHEARSED, rehearsed.sentence, best.device_bytes)
        if best.device_bytes >= IMPOSSIBLE_BYTES:
            return Tried(recipe.nodes, BROKEN_ESTIMATE, "its estimate cannot be right, which is a bug of llmlaunch")
        if best.device_bytes <= setting.limit.limit_bytes:
            return Tried(recipe.nodes, HOST_MEMORY, "fits the devices, not the host memory", best.device_bytes)
        needs, limit = best.device_bytes / GIB, setting.limit.limit_bytes / GIB
        return Tried(recipe.nodes, MEMORY, f"needs {needs:.1f} GiB of {limit:.1f} GiB", best.device_bytes)
    length = job_length(recipe, best.step_seconds)
    over = beyond(recipe.budget, length)
    return Tried(recipe.nodes, over, f"takes {said(length, over)}", best.device_bytes, length)


def _no_legal(found: Found) -> str:
    """Splittable, and yet the backend refuses every layout."""
    if not found.refused:
        return "no split of the devices matches the pins"
    key, _ = max(found.refused.items(), key=lambda item: item[1])
    sentence = next((rule.sentence for rule in found.rules if rule.key == key), key)
    return f"no layout is legal, most because {sentence} [{key}]"


def most_nodes(recipe: Recipe) -> int:
    """How far more nodes are looked for."""
    return recipe.budget.max_nodes or min(max(DEFAULT_MOST_NODES, 2 * recipe.nodes), MOST_NODES)


def beyond(budget: Budget, length: JobLength) -> str | None:
    """The part of the budget that the job exceeds most, by its key; None where it stays within."""
    over = {key: share for key, share in _shares(budget, length).items() if share > 1.0}
    return max(over, key=lambda key: over[key]) if over else None


def excess(budget: Budget, length: JobLength) -> float:
    """How many times the tightest part of the budget the job takes."""
    return max(_shares(budget, length).values(), default=0.0)


def _shares(budget: Budget, length: JobLength) -> dict[str, float]:
    taken = {DAYS: length.seconds / DAY, GPU_HOURS: length.gpu_hours}
    allowed = {DAYS: budget.days, GPU_HOURS: budget.gpu_hours}
    return {key: taken[key] / most for key, most in allowed.items() if most is not None}


def said(length: JobLength, key: str | None = None) -> str:
    """What of the job a part of the budget is about, in its unit; all of it where none is named."""
    hours = f"{length.gpu_hours:,.0f} GPU-hours"
    if key is None:
        return f"{duration(length.seconds)} and {hours}"
    return hours if key == GPU_HOURS else f"{length.seconds / DAY:,.2f} days"


def sufficient(budget: Budget, length: JobLength) -> str:
    """The keys of the budget the job exceeds, each with what would do."""
    enough = {DAYS: math.ceil(length.seconds / DAY * 100) / 100, GPU_HOURS: math.ceil(length.gpu_hours)}
    return ", ".join(f"budget.{key}: {enough[key]}" for key, share in _shares(budget, length).items() if share > 1.0)
