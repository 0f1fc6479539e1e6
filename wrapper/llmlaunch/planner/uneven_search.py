"""Uneven pipeline stages, solved for each split that can still be among the fastest.

A step takes at least as long as with stages in perfect balance. If even that is longer than layouts that are safe
already, the split is outpaced and its stages are not evaluated. So the first of the ranking are exact, and most splits
cost one comparison.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from llmlaunch.backends.base import StepTechniques
from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn
from llmlaunch.layout import LayoutColumns, Rule
from llmlaunch.memory.grouped_pricing import distinct_states
from llmlaunch.memory.states import least_state_bytes
from llmlaunch.planner.preference import preference_factor
from llmlaunch.planner.pricing import (
    Points,
    Rows,
    TechniqueBatch,
    group_equal,
    is_safe,
    legal_rows,
    state_batch,
    state_job,
    state_update,
)
from llmlaunch.planner.search_space import TechniqueSpace, apply_techniques, recipe_with_techniques
from llmlaunch.planner.setting import Setting
from llmlaunch.planner.stage_search import balanced, balanced_within, costs_of
from llmlaunch.recipe.types import Recipe
from llmlaunch.timing.passes import pass_seconds

__all__ = ["UnevenLayouts", "search_uneven"]

AT_ONCE = 2048  # splits evaluated together, the fastest bounds first; the next ones may be outpaced by then


@dataclass
class UnevenLayouts:
    """Points of uneven splits, each block over splits of its own, and what became of the others: how many each rule
    refuses, how many exceed device memory for every cut of the layers, how many were outpaced. `fastest` are the
    preferred seconds of the first safe layouts, as many as the ranking has to show exactly: no layout that takes
    longer than the last of them can be among them, or be the fastest."""

    fastest: FloatColumn
    splits: list[LayoutColumns] = field(default_factory=list)
    blocks: list[Rows] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    overfull: int = 0
    outpaced: int = 0

    @property
    def seconds_to_beat(self) -> float:
        return float(self.fastest.max())

    def add(self, recipe: Recipe, space: TechniqueSpace, splits: LayoutColumns, rows: Rows, safe: BoolColumn) -> None:
        self.splits.append(splits)
        self.blocks.append(rows)
        preferred = rows.step_seconds * preference_factor(recipe, Points(splits, space.step, space.state, rows))
        self.fastest = np.sort(np.concatenate([self.fastest, preferred[safe]]))[: len(self.fastest)]


def search_uneven(
    setting: Setting, splits: LayoutColumns, space: TechniqueSpace, rules: Sequence[Rule], fastest: FloatColumn
) -> UnevenLayouts:
    """Price the legal uneven `splits` with all techniques that leave no amount to solve. `fastest` are the preferred
    seconds to beat, infinite where there are fewer. If the best balance is not safe, the best that memory allows
    replaces it."""
    result = UnevenLayouts(fastest)
    combinations = sum(not space.switches[i] for i in space.step_without_amounts) * len(space.state)
    # to recompute and to offload only costs
    fastest_steps = dict.fromkeys(step.keeping_all for step in space.step)
    bounds = [_least_seconds(setting, step, space, splits) for step in fastest_steps]
    in_reach = np.min(bounds, axis=0) < result.seconds_to_beat
    result.outpaced += combinations * int(np.count_nonzero(~in_reach))
    splits = splits.take(np.flatnonzero(in_reach))
    fits = _states_fit(setting, space, splits)
    for indices in group_equal(setting, space):
        for i in space.step_without_amounts:
            legal = np.array([legal_rows(setting, space, (i, j), splits, rules, result.refused) for j in indices])
            allowed = legal & fits[indices]
            result.overfull += int(np.count_nonzero(legal & ~allowed))
            rows = np.flatnonzero(allowed.any(axis=0))
            batches = _batches(setting, space, (i, indices[0]), splits.take(rows), result)
            priced = sum(
                _price(setting, space, (i, indices), batch, allowed[:, rows[which]], result) for batch, which in batches
            )
            result.outpaced += int(np.count_nonzero(allowed)) - priced
    return result


def _states_fit(setting: Setting, space: TechniqueSpace, splits: LayoutColumns) -> BoolColumn:
    """Whether the model states of each split (column) can fit with each set of state techniques (row), for some way of
    assigning layers to stages."""
    distinct, state_of = distinct_states(setting.job, splits)
    least = [
        least_state_bytes(state_job(setting, space, index), distinct.with_techniques(state.zero_stage, 0, 0, 0))
        for index, state in enumerate(space.state)
    ]
    fits: BoolColumn = np.array([bytes_[state_of] for bytes_ in least]) <= setting.limit.limit_bytes
    return fits


def _least_seconds(setting: Setting, step: StepTechniques, space: TechniqueSpace, splits: LayoutColumns) -> FloatColumn:
    """Return the seconds of a step in perfect balance: no cut of the layers is faster."""
    layouts = splits.with_techniques(0, step.recompute, step.recompute_layers, step.offload_layers)
    job = setting.job_of(recipe_with_techniques(setting.recipe, step, space.state[0]))
    return pass_seconds(job, setting.cluster, layouts, in_balance=True).total


def _batches(
    setting: Setting, space: TechniqueSpace, indices: tuple[int, int], splits: LayoutColumns, result: UnevenLayouts
) -> Iterator[tuple[LayoutColumns, IntColumn]]:
    """Yield the splits that are not outpaced, the fastest bounds first, with their layers cut in the best balance, and
    their row numbers."""
    recipe, layouts = apply_techniques(setting.recipe, space, indices, splits)
    job, cluster = setting.job_of(recipe), setting.cluster
    costs = costs_of(job, cluster, layouts)
    least = _least_seconds(setting, space.step[indices[0]], space, splits)
    waiting = np.argsort(least, kind="stable")
    while len(waiting := waiting[least[waiting] < result.seconds_to_beat]):
        now, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
        cut = balanced(job, layouts.take(now), costs.take(now))
        fast = pass_seconds(job, cluster, cut).total < result.seconds_to_beat
        chosen = cut.uneven & fast  # even cuts are searched with the even splits
        yield cut.take(chosen), now[chosen]


def _price(
    setting: Setting,
    space: TechniqueSpace,
    indices: tuple[int, Sequence[int]],
    splits: LayoutColumns,
    allowed: BoolColumn,
    result: UnevenLayouts,
) -> int:
    """Price the splits that are fast enough with their update, for each of the state techniques that are `allowed`
    (state techniques x splits), and return how many points that are. Time comes first: it costs less than the memory of
    all ranks."""
    if not len(splits):
        return 0
    step_index, state_indices = indices
    batch, distinct = _technique_batch(setting, space, (step_index, state_indices[0]), splits)
    priced = 0
    for index, mine in zip(state_indices, allowed, strict=True):
        seconds = batch.step_seconds(state_update(setting, space, index, distinct))
        near = np.flatnonzero(mine & (seconds < result.seconds_to_beat))
        priced += len(near)
        if len(near):
            rows = batch.take(near).priced_with(state_batch(setting, space, index, distinct), seconds[near])
            _add(setting, space, (step_index, index), splits.take(near), rows, result)
    return priced


def _add(
    setting: Setting,
    space: TechniqueSpace,
    indices: tuple[int, int],
    splits: LayoutColumns,
    rows: Rows,
    result: UnevenLayouts,
) -> None:
    """Add the rows; the best cut that memory allows takes the place of a cut that is not safe."""
    safe = is_safe(setting, rows.device_bytes, rows.host_bytes)
    again = np.flatnonzero(~safe)
    keep = np.ones(len(rows), dtype=np.bool_)
    if len(again):
        keep[again[_add_fitting(setting, space, indices, splits.take(again), result)]] = False
    rows = replace(rows.take(keep), split=np.arange(np.count_nonzero(keep)))
    result.add(setting.recipe, space, splits.take(keep), rows, safe[keep])


def _add_fitting(
    setting: Setting, space: TechniqueSpace, indices: tuple[int, int], splits: LayoutColumns, result: UnevenLayouts
) -> IntColumn:
    """Add the best cut that memory allows of each of `splits`; return the row numbers of those that have one."""
    recipe, layouts = apply_techniques(setting.recipe, space, indices, splits)
    job = setting.job_of(recipe)
    costs = costs_of(job, setting.cluster, layouts)
    fitting, cut = balanced_within(job, layouts, costs, setting.limit.limit_bytes)
    if len(fitting):
        batch, distinct = _technique_batch(setting, space, indices, cut)
        rows = batch.priced_with(state_batch(setting, space, indices[1], distinct))
        result.add(setting.recipe, space, cut, rows, is_safe(setting, rows.device_bytes, rows.host_bytes))
    return fitting


def _technique_batch(
    setting: Setting, space: TechniqueSpace, indices: tuple[int, int], splits: LayoutColumns
) -> tuple[TechniqueBatch, LayoutColumns]:
    """Return the splits with the techniques at `indices`, and the few that differ in their model states."""
    recipe, layouts = apply_techniques(setting.recipe, space, indices, splits)
    job = setting.job_of(recipe)
    distinct, state_of = distinct_states(job, layouts)
    return TechniqueBatch(setting, job, indices[0], np.arange(len(layouts)), layouts, state_of), distinct
