"""Search the whole space of a recipe: refuse with a reason, keep the safe layouts, rank them by step time.

A rehearsal of a layout goes before its estimate, both ways: it refuses what the estimate lets pass, and it lets pass
what the estimate refuses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import TypeVar

import numpy as np

from llmlaunch.calibration.support import MeasuredStep, Rehearsal
from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn
from llmlaunch.frozen import frozen
from llmlaunch.layout import Layout, LayoutColumns, Rule, refusal_counts
from llmlaunch.memory.guard import IMPOSSIBLE_BYTES
from llmlaunch.planner.plan import TIGHT, Candidate, FasterLayout, HabitPrice
from llmlaunch.planner.preference import preference_factor, prices_at
from llmlaunch.planner.pricing import Points, first_failed, is_safe, price, situation
from llmlaunch.planner.search_space import (
    SPLIT_FIELDS,
    enumerate_splits,
    enumerate_uneven,
    recipe_with_techniques,
    technique_space,
)
from llmlaunch.planner.setting import Setting
from llmlaunch.planner.uneven_search import search_uneven
from llmlaunch.recipe.types import Recipe

__all__ = [
    "BROKEN_ESTIMATE",
    "HOST_MEMORY",
    "MEMORY",
    "OUTPACED",
    "REHEARSED",
    "SearchResult",
    "evidence_of",
    "faster_layout",
    "pareto",
    "search",
]

# Why a layout is refused, beside the keys of the backend's rules.
MEMORY = "memory"
HOST_MEMORY = "host_memory"  # fits the devices, not the node
OUTPACED = "outpaced"
BROKEN_ESTIMATE = "broken_estimate"  # a law of memory is broken: a bug of llmlaunch
REHEARSED = "rehearsed"

EQUAL = 1e-3  # shares of a step that no model of time can tell apart
EXACT = 6  # the chosen layout and the runners-up a plan shows
RANKED = 64  # sorting a million layouts takes longer than pricing them, and few look past the first


@frozen
class SearchResult:
    """The legal layouts with their worst rank and step time, by column.

    `first` is the beginning of the ranking: the safe points by `preferred_seconds`, step time with what the preference
    adds to it, or, where none is safe, all legal ones by how full they make the fullest memory, of a device or of a
    node. Of the `searched` layouts, each is safe or `refused` for one reason; OUTPACED are uneven stages that cannot be
    among the EXACT first. `rehearsed` maps point indices to the rehearsals that decide about them, `measured` to the
    runs whose step time theirs is.
    """

    points: Points
    safe: BoolColumn
    first: IntColumn
    preferred_seconds: FloatColumn
    searched: int
    refused: Mapping[str, int]
    rules: Sequence[Rule]
    rehearsed: Mapping[int, Rehearsal] = field(default_factory=dict)
    measured: Mapping[int, MeasuredStep] = field(default_factory=dict)

    @property
    def device_bytes(self) -> FloatColumn:
        return self.points.rows.device_bytes

    @property
    def step_seconds(self) -> FloatColumn:
        return self.points.rows.step_seconds

    def candidate(self, recipe: Recipe, place: int) -> Candidate:
        """Return the candidate at `place` of the ranking."""
        return self.at(recipe, int(self.first[place]))

    def at(self, recipe: Recipe, index: int) -> Candidate:
        """Return the candidate at `index` of the points."""
        points, seconds = self.points, float(self.step_seconds[index])
        planned = recipe_with_techniques(recipe, *points.techniques(index))
        return Candidate(
            layout=points.layout(index),
            device_bytes=int(points.rows.device_bytes[index]),
            worst_pipeline_rank=int(points.rows.worst_pipeline_rank[index]),
            step_seconds=seconds,
            tokens_per_second_per_gpu=recipe.workload.tokens_per_step / seconds / recipe.world_size,
            techniques=planned.techniques,
            gradient_dtype=planned.training.gradient_dtype,
        )


def faster_layout(result: SearchResult, recipe: Recipe) -> FasterLayout | None:
    """Return the fastest safe layout where the preference chose another one that takes longer by more than EQUAL."""
    safe, chosen = np.flatnonzero(result.safe), int(result.first[0])
    if not len(safe):
        return None
    fastest = int(safe[np.argmin(result.step_seconds[safe])])
    gain = float(result.step_seconds[chosen] / result.step_seconds[fastest]) - 1.0
    if gain <= EQUAL:
        return None
    paid = {habit.name: price for habit, price in prices_at(recipe, result.points, chosen)}
    counted = [
        HabitPrice(habit.name, price, habit.reason)
        for habit, price in prices_at(recipe, result.points, fastest)
        if price > paid.get(habit.name, 0.0)
    ]
    return FasterLayout(result.at(recipe, fastest), gain, tuple(sorted(counted, key=lambda habit: -habit.price)))


def search(setting: Setting) -> SearchResult:
    """Price every legal layout. Nothing is sampled: `check` and `plan` see the same space.

    Raises:
        UserError: the recipe asks for what its backend cannot do whatever the layout.
    """
    recipe, backend = setting.recipe, setting.backend
    space, techniques = backend.space(recipe), technique_space(recipe, backend)
    rules = backend.rules(recipe)
    technique_rules = [rule for rule in rules if rule.of_techniques]
    refused: Counter[str] = Counter()
    combinations = techniques.plain_steps * len(techniques.state)
    even = _legal(recipe, rules, enumerate_splits(recipe, space), combinations, refused)
    points, by_techniques = price(setting, even, techniques, technique_rules)
    plain = sum(not techniques.switches[i] for i in techniques.step_without_amounts)
    combinations = plain * len(techniques.state)
    splits = _legal(recipe, rules, enumerate_uneven(recipe, space), combinations, refused)
    uneven = search_uneven(setting, splits, techniques, technique_rules, _fastest(setting, points))
    points = points.extended(uneven.splits, uneven.blocks)
    filled = np.maximum(
        points.rows.device_bytes / max(setting.limit.limit_bytes, 1),
        points.rows.host_bytes / max(setting.host_limit.limit_bytes, 1),
    )
    rehearsed = _points_of(setting.lessons.rehearsals, recipe, points)
    measured = _points_of(setting.lessons.measured_steps, recipe, points)
    points = _with_measured_steps(points, measured)
    safe, by_memory = _judged(setting, points, rehearsed, filled)
    preferred = points.rows.step_seconds * preference_factor(recipe, points)
    refused = refused + by_techniques + uneven.refused + by_memory
    refused += Counter({MEMORY: uneven.overfull, OUTPACED: uneven.outpaced})
    return SearchResult(
        points=points,
        safe=safe,
        first=_ranking(points, preferred, safe, filled),
        preferred_seconds=preferred,
        searched=sum(refused.values()) + int(np.count_nonzero(safe)),
        refused=dict(refused),
        rules=rules,
        rehearsed=rehearsed,
        measured=measured,
    )


def _with_measured_steps(points: Points, measured: Mapping[int, MeasuredStep]) -> Points:
    """Return the points with the step times of those that ran, as measured."""
    if not measured:
        return points
    seconds = points.rows.step_seconds.copy()
    for row, step in measured.items():
        seconds[row] = step.step_seconds
    return replace(points, rows=replace(points.rows, step_seconds=seconds))


def _legal(
    recipe: Recipe, rules: Sequence[Rule], splits: LayoutColumns, combinations: int, refused: Counter[str]
) -> LayoutColumns:
    """Return the splits that pass the rules that look at sizes alone. Each failure is added to `refused`, once for each
    combination of techniques the split would have been tried with."""
    size_rules = [rule for rule in rules if not rule.of_techniques]
    failed = first_failed(size_rules, situation(recipe, splits))
    for key, count in refusal_counts(size_rules, failed).items():
        refused[key] += combinations * count
    return splits.take(np.flatnonzero(failed < 0))


def _fastest(setting: Setting, points: Points) -> FloatColumn:
    """Return the preferred seconds of the EXACT first safe points, infinite where there are fewer; of more points where
    a rehearsal may refuse some of them, or a run may have shown them to be slower."""
    exact = EXACT + _refutable(setting.lessons.rehearsals, setting.recipe) + len(setting.lessons.measured_steps)
    safe = is_safe(setting, points.rows.device_bytes, points.rows.host_bytes)
    preferred = points.rows.step_seconds * preference_factor(setting.recipe, points)
    seconds = np.concatenate([preferred[safe], np.full(exact, np.inf)])
    return np.sort(np.partition(seconds, exact)[:exact] if len(seconds) > exact else seconds)


def _judged(
    setting: Setting, points: Points, rehearsed: Mapping[int, Rehearsal], filled: FloatColumn
) -> tuple[BoolColumn, Counter[str]]:
    """Return which points are safe, by the estimate or by a rehearsal where there is one, and how many of the others
    are refused for what. For points that a rehearsal refuses, `filled` is set to what it measured; it cannot lift an
    estimate that breaks a law."""
    rows = points.rows
    limit = setting.limit
    fits, fits_node = rows.device_bytes <= limit.limit_bytes, rows.host_bytes <= setting.host_limit.limit_bytes
    safe = is_safe(setting, rows.device_bytes, rows.host_bytes)
    broken = np.maximum(rows.device_bytes, rows.host_bytes) >= IMPOSSIBLE_BYTES
    refuted, lifted = np.zeros(len(points), dtype=np.bool_), np.zeros(len(points), dtype=np.bool_)
    for row, rehearsal in rehearsed.items():
        refuted[row] = rehearsal.refuses(limit.limit_bytes)
        lifted[row] = rehearsal.allows(limit.limit_bytes) and fits_node[row] and not broken[row]
        if refuted[row]:
            filled[row] = max(filled[row], rehearsal.device_bytes / max(limit.limit_bytes, 1), 1.0)
    beyond = ~fits & ~lifted & ~broken
    tight = beyond & fits_node & (rows.device_bytes <= limit.most_bytes)
    refused = {
        TIGHT: int(np.count_nonzero(tight)),
        MEMORY: int(np.count_nonzero(beyond & ~tight)),
        HOST_MEMORY: int(np.count_nonzero(fits & ~safe & ~broken)),
        BROKEN_ESTIMATE: int(np.count_nonzero(broken)),
        REHEARSED: int(np.count_nonzero(safe & refuted)),
    }
    return (safe | lifted) & ~refuted, Counter(refused)


def _ranking(points: Points, preferred: FloatColumn, safe: BoolColumn, filled: FloatColumn) -> IntColumn:
    """Return the first RANKED safe points by preferred seconds; where none is safe, of all points by how full the
    fullest memory is. Ties never wobble: even stages, the techniques offered first, the smaller split, then the other
    figure decide them."""
    rows, splits = points.rows, points.splits
    index = np.flatnonzero(safe)
    by, then = (preferred, filled) if len(index) else (filled, preferred)
    if not len(index):
        index = np.arange(len(points))
    if len(index) > RANKED:
        near = by[index]
        index = index[near <= np.partition(near, RANKED)[RANKED] + 1e-9]
    split = rows.split[index]
    size = (splits.tensor * splits.pipeline * splits.context * splits.virtual_pipeline)[split]
    ties = (
        index,
        then[index],
        size,
        rows.state_techniques[index],
        rows.step_techniques[index],
        splits.partition[split] != 0,
    )
    first: IntColumn = index[np.lexsort((*ties, np.round(by[index], 12)))][:RANKED]
    return first


Evidence = TypeVar("Evidence", Rehearsal, MeasuredStep)


def _points_of(evidence: Iterable[Evidence], recipe: Recipe, points: Points) -> Mapping[int, Evidence]:
    """Map point indices to the evidence on exactly that layout, with the same techniques and workload."""
    by_row: dict[int, Evidence] = {}
    for one_layout in evidence:
        for row in np.flatnonzero(_same_split(points, one_layout.layout)[points.rows.split]):
            planned = recipe_with_techniques(recipe, *points.techniques(int(row)))
            if points.layout(int(row)) == one_layout.layout and _same_techniques(planned, one_layout):
                by_row[int(row)] = one_layout
    return by_row


def _same_split(points: Points, layout: Layout) -> BoolColumn:
    """Whether each split has the layout's sizes: few of millions of points are then compared one by one."""
    same = np.ones(len(points.splits), dtype=np.bool_)
    for name in SPLIT_FIELDS:
        same &= np.equal(getattr(points.splits, name), getattr(layout, name))
    return same


def _same_techniques(recipe: Recipe, evidence: Rehearsal | MeasuredStep) -> bool:
    techniques = recipe.techniques, recipe.training.gradient_dtype
    return recipe.workload == evidence.workload and techniques == (evidence.techniques, evidence.gradient_dtype)


def evidence_of(evidence: Iterable[Evidence], recipe: Recipe, layout: Layout) -> Evidence | None:
    """Return the evidence on one layout with the techniques of `recipe`."""
    return next((e for e in evidence if e.layout == layout and _same_techniques(recipe, e)), None)


def _refutable(rehearsals: Iterable[Rehearsal], recipe: Recipe) -> int:
    """Return the most layouts of the recipe's search that a rehearsal refuses."""
    mine = (r for r in rehearsals if r.layout.world_size == recipe.world_size)
    return sum(not r.safe and r.workload == recipe.workload for r in mine)


def pareto(result: SearchResult) -> IntColumn:
    """Return the indices of the safe layouts that nothing beats in both step time and head-room, fastest first: each
    next one is slower and leaves more free. Of layouts equal in both the first stands for all."""
    safe = np.flatnonzero(result.safe)
    filled = result.device_bytes[safe]
    order = np.lexsort((safe, filled, np.round(result.step_seconds[safe], 12)))
    filled = filled[order]
    least_before = np.concatenate([[np.inf], np.minimum.accumulate(filled)])[: len(filled)]
    front: IntColumn = safe[order[filled < least_before]]
    return front
