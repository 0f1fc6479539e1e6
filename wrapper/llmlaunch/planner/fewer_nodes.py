"""Layouts for fewer nodes, with which a job goes on in its allocation where nodes are lost and no spare one is left
(`nodes.at_least`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from llmlaunch.errors import UserError
from llmlaunch.frameworks.resharding import other_world_refusal
from llmlaunch.planner.fallbacks import can_load
from llmlaunch.planner.headroom import search_with_headroom
from llmlaunch.planner.plan import Candidate, FewerNodes, Plan
from llmlaunch.planner.planning import plan_of
from llmlaunch.planner.setting import Setting
from llmlaunch.planner.sizing import no_split_reason, splittable
from llmlaunch.recipe.types import Recipe
from llmlaunch.recipe.written import place_of
from llmlaunch.rundir.values import counted

MOST_LAYOUTS = 8  # each is a folder of the run directory
MOST_TRIED = 12  # a search takes a second or two
# More nodes that gain less than this rather wait as spare ones: the error of predicted step times is larger.
WORTH = 0.02


def find_fewer_nodes(setting: Setting, plan: Plan) -> FewerNodes:
    """Return layouts for fewer nodes than those of `plan`, down to `nodes.at_least`, the most nodes first. Each is the
    fastest safe one of its number of nodes, by the same limit and pins, that trains the same global batch, loads the
    checkpoints of `plan` and saves what `plan` loads. A number of nodes that is hardly faster than a smaller one has
    none.

    Raises:
        UserError: the checkpoints of `plan` cannot be loaded on another number of nodes, or no fewer nodes have a safe
            layout.
    """
    recipe = setting.recipe
    refusal = other_world_refusal(recipe, plan.layout)
    if refusal:
        raise UserError(f"{_place(recipe)}: nodes.at_least: {refusal}")
    whys: dict[int, str] = {}
    plans: list[tuple[int, Plan]] = []
    for nodes in _counts(setting, plan.chosen):
        fewer, why = _plan(setting, plan.chosen, nodes)
        if fewer is None:
            whys[nodes] = why
        else:
            plans.append((nodes, fewer))
    if not plans:
        raise UserError(f"{_place(recipe)}: nodes.at_least: {_none(recipe, whys)}")
    return FewerNodes(tuple(_worth_it(sorted(plans, key=lambda pair: pair[0]))), whys)


def fewer_nodes_json(fewer: FewerNodes) -> list[dict[str, Any]]:
    """Return the layouts for `check --json`, each with the whole job on so many nodes."""
    return [{"nodes": nodes} | plan.chosen.as_json() | {"job": asdict(plan.length)} for nodes, plan in fewer.plans]


def _place(recipe: Recipe) -> str:
    return place_of(recipe, ("nodes", "at_least"))


def _counts(setting: Setting, chosen: Candidate) -> list[int]:
    """Return the numbers of nodes to search, MOST_TRIED at most: first those that need but fewer data parallel ranks,
    then those that can be split at all, the most and the fewest nodes and evenly between."""
    recipe = setting.recipe
    counts = np.arange(recipe.at_least_nodes or recipe.nodes, recipe.nodes)
    able = [int(count) for count in counts[splittable(setting, counts)]][::-1]
    natural = [count for count in able if _only_fewer_ranks(recipe, chosen, count)][: MOST_TRIED - 2]
    others = [count for count in able if count not in natural]
    return [*natural, *_spread(others, MOST_TRIED - len(natural))]


def _only_fewer_ranks(recipe: Recipe, chosen: Candidate, nodes: int) -> bool:
    layout = chosen.layout
    group = layout.world_size // layout.data
    ranks, left = divmod(nodes * recipe.cluster.devices_per_node, group)
    return not left and ranks > 0 and recipe.workload.global_batch_size % (ranks * layout.micro_batch_size) == 0


def _spread(counts: Sequence[int], most: int) -> list[int]:
    if len(counts) <= most:
        return [*counts]
    return [counts[int(index)] for index in np.unique(np.linspace(0, len(counts) - 1, most).round())]


def _plan(setting: Setting, chosen: Candidate, nodes: int) -> tuple[Plan | None, str]:
    """Return the plan for so many nodes; None and why where there is none."""
    recipe = setting.recipe
    pins = {**recipe.pins, "zero_stage": chosen.layout.zero_stage}  # no checkpoint is loaded at another stage
    fewer = replace(setting.with_recipe(replace(recipe, nodes=nodes, pins=pins)), widened=False)
    result = search_with_headroom(fewer)
    if not len(result.points):
        return None, "no layout is legal"
    if not np.any(result.safe):
        return None, "no layout is safe"
    for place in range(len(result.first)):
        candidate = result.candidate(fewer.recipe, place)
        if can_load(recipe, chosen, candidate) and can_load(recipe, candidate, chosen):
            return plan_of(fewer, result, place), ""
    return None, "no safe layout loads the checkpoints of the planned one"


def _worth_it(plans: Sequence[tuple[int, Plan]]) -> Iterator[tuple[int, Plan]]:
    """Yield of plans in ascending order those that are faster than all before them, the most nodes first; of more than
    MOST_LAYOUTS the fewest nodes and the most."""
    worth: list[tuple[int, Plan]] = []
    for nodes, plan in plans:
        if not worth or plan.chosen.step_seconds < (1.0 - WORTH) * worth[-1][1].chosen.step_seconds:
            worth.append((nodes, plan))
    few, many = worth[:1], worth[1:]
    yield from reversed([*few, *many[-(MOST_LAYOUTS - 1) :]])


def _none(recipe: Recipe, whys: dict[int, str]) -> str:
    fewest, most = recipe.at_least_nodes or 0, recipe.nodes - 1
    which = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    if not whys:
        reason = no_split_reason(recipe, most)
    else:
        reason = "; ".join(dict.fromkeys(whys.values()))
        pins = ", ".join(f"{name}: {value}" for name, value in recipe.pins.items())
        reason += f" (pinned: {pins})" if pins else ""
    return (
        f"no layout for {which} of {counted(recipe.nodes, 'node')}: {reason}; lower at_least, unpin a size, or leave "
        "at_least out"
    )
