"""How many nodes a job needs: the fewest with a safe layout that stays within the recipe's budget.

Safe on n nodes does not mean safe on n + 1, because sizes must divide; so counts are tried one after the other, from
the fewest. Counts whose devices cannot be split at all are refused without pricing anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llmlaunch.layout import Layout
from llmlaunch.memory.guard import IMPOSSIBLE_BYTES
from llmlaunch.planner.headroom import search_with_headroom
from llmlaunch.planner.plan import (
    DAYS,
    GPU_HOURS,
    NO_LAYOUT,
    JobLength,
    NodeTrial,
    Sizing,
    budget_shares,
    most_exceeded,
)
from llmlaunch.planner.search import BROKEN_ESTIMATE, HOST_MEMORY, MEMORY, REHEARSED, SearchResult, search
from llmlaunch.planner.search_space import MOST_CONTEXT, offered_values, pinned_numbers
from llmlaunch.planner.setting import BudgetSpent, PricingBudget, Setting
from llmlaunch.planner.tight import search_tight
from llmlaunch.progress import report
from llmlaunch.recipe.types import MOST_NODES, Budget, Recipe
from llmlaunch.timing.arithmetic import least_device_seconds
from llmlaunch.units import DAY, GIB, duration
from llmlaunch.verdicts import TIGHT

DEFAULT_MOST_NODES = 1024
ALL_UP_TO = 64
AT_ONCE = 1024


def most_nodes(recipe: Recipe) -> int:
    """Return the largest number of nodes that is considered."""
    return recipe.budget.max_nodes or min(max(DEFAULT_MOST_NODES, 2 * recipe.nodes), MOST_NODES)


def smallest_cluster(setting: Setting, fewest: int, most: int) -> Sizing:
    """Return the trials up to the first count of nodes from `fewest` to `most` with a safe layout within the budget.

    Every count that can be split is tried up to ALL_UP_TO, and beyond it those at least a 32nd to a 64th above the last
    one that had a layout. Counts whose arithmetic alone exceeds the budget are not searched, unless nothing else is
    safe: then the nearest of those is.
    """
    trials: list[NodeTrial] = []
    searched = 0
    for nodes, can_split in _counts(setting, fewest, most):
        report("nodes", nodes, most)
        if not can_split:
            trials.append(NodeTrial(nodes, NO_LAYOUT, no_split_reason(setting.recipe, nodes)))
        elif nodes == most or nodes - searched >= stride(nodes):
            sized = setting.with_recipe(replace(setting.recipe, nodes=nodes))
            trials.append(_hopeless(sized) or _try(sized))
            if trials[-1].refused is None:
                return Sizing(tuple(trials))
            searched = nodes if trials[-1].device_bytes is not None else searched
    return Sizing(_with_a_safe_count(setting, trials))


@dataclass(frozen=True)
class SafeNodes:
    """A count of nodes with a safe layout; whether it is the fewest, or fewer were left out."""

    nodes: int
    layout: Layout
    fewest: bool = True


def fewest_safe(setting: Setting, nodes: int, most: int, candidates: float) -> SafeNodes | None:
    """Return the fewest nodes above `nodes` with a safe layout, whatever the recipe's budget, or None.

    Doubles of `nodes` come first. A layout of fewer nodes also fits on twice as many, so where a double has layouts but
    no safe one, fewer nodes have none either. Then the counts below the first safe double are searched: all of them up
    to ALL_UP_TO, and beyond it as many as `stride` leaves. They are skipped if they may cost more than `candidates`.

    Raises:
        BudgetSpent: the candidates are used up, and no double is known to be safe.
    """
    last_unsafe, double, cost = _safe_double(setting, nodes, most, candidates)
    if double is not None:
        between = _counts(setting, last_unsafe + 1, double.nodes - 1)
        searches = sum(1.0 / stride(count) for count, can_split in between if can_split)
        if not double.fewest or cost * searches > candidates:
            return replace(double, fewest=False)
    try:
        with PricingBudget(candidates).limiting():
            return _first_safe(setting, last_unsafe + 1, most if double is None else double.nodes - 1) or double
    except BudgetSpent:
        if double is None:
            raise
        return replace(double, fewest=False)


def _safe_double(setting: Setting, nodes: int, most: int, candidates: float) -> tuple[int, SafeNodes | None, float]:
    """Return the last double that has layouts but no safe one, the first double with a safe layout, if there is one up
    to `most`, and what the last search cost. Each double may cost as much as `candidates`."""
    last_unsafe, cost = nodes, 0.0
    while (nodes := 2 * nodes) <= most:
        if not splittable(setting, np.array([nodes]))[0]:
            continue
        report("nodes", nodes, most)
        budget = PricingBudget(candidates)
        try:
            with budget.limiting():
                safe, any_legal = _search_on(setting, nodes)
        except BudgetSpent as spent:
            safe, any_legal = None if spent.safe_layout is None else SafeNodes(nodes, spent.safe_layout), False
        cost = candidates - budget.left
        if safe is not None:
            return last_unsafe, safe, cost
        last_unsafe = nodes if any_legal else last_unsafe
    return last_unsafe, None, cost


def _first_safe(setting: Setting, fewest: int, most: int) -> SafeNodes | None:
    """Return the first count from `fewest` to `most` with a safe layout; beyond ALL_UP_TO `stride` leaves some out."""
    searched = 0
    for nodes, can_split in _counts(setting, fewest, most):
        if can_split and (nodes == most or nodes - searched >= stride(nodes)):
            report("nodes", nodes, most)
            safe, any_legal = _search_on(setting, nodes)
            if safe is not None:
                return safe
            searched = nodes if any_legal else searched
    return None


def _search_on(setting: Setting, nodes: int) -> tuple[SafeNodes | None, bool]:
    """Return the fastest safe layout on this number of nodes, if there is one, and whether any layout is legal."""
    sized = setting.with_recipe(replace(setting.recipe, nodes=nodes))
    result = search(sized, exact=1, safe_alone=True)
    layout = result.candidate(sized.recipe, 0).layout if np.any(result.safe) else None
    return None if layout is None else SafeNodes(nodes, layout), result.any_legal


def stride(nodes: int) -> int:
    """Return how far apart counts are searched: 1 up to ALL_UP_TO, 2 up to its double, 4 up to the next, and so on."""
    return 1 if nodes <= ALL_UP_TO else 2 ** ((nodes - 1).bit_length() - (ALL_UP_TO - 1).bit_length())


def _with_a_safe_count(setting: Setting, trials: Sequence[NodeTrial]) -> tuple[NodeTrial, ...]:
    """If no searched count is safe, search the counts skipped for the budget, the nearest to it first, until one is."""
    by_nodes = {trial.nodes: trial for trial in trials}
    skipped = [trial.nodes for trial in trials if trial.refused in (DAYS, GPU_HOURS) and trial.length is None]
    if setting.recipe.budget.days is not None:
        skipped.reverse()  # more nodes are faster, fewer cost less
    for nodes in skipped if all(trial.length is None for trial in trials) else ():
        by_nodes[nodes] = _try(setting.with_recipe(replace(setting.recipe, nodes=nodes)))
        if by_nodes[nodes].length is not None:
            break
    return tuple(by_nodes.values())


def _counts(setting: Setting, fewest: int, most: int) -> Iterator[tuple[int, bool]]:
    """Yield each count and whether its devices can be split; lazily, AT_ONCE counts at a time."""
    for first in range(fewest, most + 1, AT_ONCE):
        counts = np.arange(first, min(first + AT_ONCE, most + 1))
        yield from zip(counts.tolist(), splittable(setting, counts).tolist(), strict=True)


def splittable(setting: Setting, counts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether all devices of each count of nodes can be tensor x pipeline x context x data, so that heads, sequence and
    batch are shared out evenly: what every framework needs, whatever else it does."""
    recipe = setting.recipe
    # Sizes are offered where they divide the devices; this many nodes are divided by all of them.
    largest = setting.with_recipe(replace(recipe, nodes=math.lcm(*range(1, MOST_CONTEXT + 1))))
    tensor = _dividing(recipe.model.num_attention_heads, _values(largest, "tensor"))
    context = _dividing(recipe.workload.sequence_length, _values(largest, "context"))
    splits = np.unique(np.multiply.outer(np.multiply.outer(tensor, context), _pipelines(largest)))
    worlds = counts * recipe.cluster.devices_per_node
    splits = splits[splits <= worlds.max()]  # a model of many layers has many more
    data = np.where(worlds[:, None] % splits == 0, worlds[:, None] // splits, 0)
    pinned = pinned_numbers(recipe, "data")
    if pinned:
        data = np.where(np.isin(data, pinned), data, 0)
    can_split = np.zeros(len(counts), dtype=np.bool_)
    for size in _values(largest, "micro_batch_size"):
        even = recipe.workload.global_batch_size % np.maximum(data * size, 1) == 0
        can_split |= np.any((data > 0) & even, axis=1)
    return can_split


def _pipelines(setting: Setting) -> NDArray[np.int64]:
    """Return the pipeline sizes to consider; where stages may be uneven they need not divide the layers."""
    recipe = setting.recipe
    free = recipe.layers_by_stage is None and not pinned_numbers(recipe, "pipeline")
    if free and setting.backend.space(recipe).uneven:
        return np.arange(1, recipe.model.num_layers + 1)
    return _values(setting, "pipeline")


def _values(setting: Setting, name: str) -> NDArray[np.int64]:
    recipe = setting.recipe
    values = pinned_numbers(recipe, name) or offered_values(recipe, setting.backend.space(recipe), name)
    return np.array(values, dtype=np.int64)


def _dividing(whole: int, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    divisors: NDArray[np.int64] = sizes[whole % sizes == 0]
    return divisors


def no_split_reason(recipe: Recipe, nodes: int) -> str:
    """Say that no layout can split the devices of so many nodes, and what they would have to share."""
    pins = ", ".join(f"{name}={value}" for name, value in recipe.pins.items())
    as_pinned = f" as pinned ({pins})" if pins else ""
    return (
        f"{nodes * recipe.cluster.devices_per_node} devices cannot be split{as_pinned} so that they share heads, "
        f"layers, sequence and training.global_batch_size: {recipe.workload.global_batch_size} evenly"
    )


def _hopeless(setting: Setting) -> NodeTrial | None:
    """Return the refusal of a count whose arithmetic alone exceeds the budget, else None."""
    recipe = setting.recipe
    if recipe.budget.days is None and recipe.budget.gpu_hours is None:
        return None
    least = JobLength.of(recipe, least_device_seconds(setting.job, setting.cluster) / recipe.world_size)
    over = most_exceeded(recipe.budget, least)
    if over is None:
        return None
    return NodeTrial(recipe.nodes, over, f"its arithmetic alone takes {length_text(least, over)}")


def _try(setting: Setting) -> NodeTrial:
    """Search one count of nodes."""
    nodes, result = setting.recipe.nodes, search_with_headroom(setting, exact=1)
    if not len(result.points):
        return NodeTrial(nodes, NO_LAYOUT, _no_legal_reason(result))
    if not np.any(result.safe) and setting.recipe.memory.accept == TIGHT:
        setting, result = search_tight(setting, result) or (setting, result)
    if not np.any(result.safe):
        return _unsafe(setting, result)
    return _safe_trial(setting, result)


def _safe_trial(setting: Setting, result: SearchResult) -> NodeTrial:
    """Return the trial of a count on which a layout may run."""
    nodes, best = setting.recipe.nodes, result.candidate(setting.recipe, 0)
    length = JobLength.of(setting.recipe, best.step_seconds)
    over = most_exceeded(setting.recipe.budget, length)
    return NodeTrial(nodes, over, f"takes {length_text(length, over)}", best.device_bytes, length, best.layout)


def _unsafe(setting: Setting, result: SearchResult) -> NodeTrial:
    """Return the trial of a count on which no layout may run, by the layout closest to it."""
    nodes, best = setting.recipe.nodes, result.candidate(setting.recipe, 0)
    rehearsed = result.rehearsed.get(int(result.first[0]))
    if rehearsed is not None and not rehearsed.safe:
        return NodeTrial(nodes, REHEARSED, rehearsed.sentence, best.device_bytes)
    if best.device_bytes >= IMPOSSIBLE_BYTES:
        return NodeTrial(nodes, BROKEN_ESTIMATE, "its estimate cannot be right, which is a bug of llmlaunch")
    if best.device_bytes <= setting.limit.limit_bytes:
        return NodeTrial(nodes, HOST_MEMORY, "fits the devices, not the host memory", best.device_bytes)
    needs, limit = best.device_bytes / GIB, setting.limit.limit_bytes / GIB
    short = f"needs {needs:.1f} GiB of {limit:.1f} GiB"
    if setting.limit.verdict_of(best.device_bytes) == TIGHT:
        return NodeTrial(nodes, TIGHT, f"is tight: {short}", best.device_bytes)
    return NodeTrial(nodes, MEMORY, short, best.device_bytes)


def _no_legal_reason(result: SearchResult) -> str:
    """Why the backend refuses every layout of devices that can be split."""
    if not result.refused:
        return "no split of the devices matches the pins"
    key, _ = max(result.refused.items(), key=lambda item: item[1])
    sentence = next((rule.sentence for rule in result.rules if rule.key == key), key)
    return f"no layout is legal, most because {sentence} [{key}]"


def length_text(length: JobLength, key: str | None = None) -> str:
    """Describe the job's length in the unit of one key of the budget; in both where no key is given."""
    hours = f"{length.gpu_hours:,.0f} GPU-hours"
    if key is None:
        return f"{duration(length.seconds)} and {hours}"
    return hours if key == GPU_HOURS else f"{length.seconds / DAY:,.2f} days"


def sufficient_budget(budget: Budget, length: JobLength) -> str:
    """List the keys of the budget that the job exceeds, each with the value that would do."""
    enough = {DAYS: math.ceil(length.seconds / DAY * 100) / 100, GPU_HOURS: math.ceil(length.gpu_hours)}
    shares = budget_shares(budget, length)
    return ", ".join(f"budget.{key}: {enough[key]}" for key, share in shares.items() if share > 1.0)
