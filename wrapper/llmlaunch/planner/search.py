"""Search the whole space of a recipe: refuse with a reason, keep the safe, rank by step time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llmlaunch.calibration.support import Rehearsal
from llmlaunch.layout import LAYOUT_FIELDS, Layout, LayoutColumns, Rule, refusal_counts
from llmlaunch.memory.guard import is_impossible
from llmlaunch.planner.plan import Candidate, Limit
from llmlaunch.planner.points import Points
from llmlaunch.planner.pricing import first_failed, is_safe, price, situation
from llmlaunch.planner.search_space import enumerate_splits, enumerate_uneven, recipe_with_techniques, technique_space
from llmlaunch.planner.setting import Setting
from llmlaunch.planner.uneven_search import open_uneven
from llmlaunch.recipe.types import Recipe

__all__ = [
    "BROKEN_ESTIMATE",
    "HOST_MEMORY",
    "MEMORY",
    "OUTPACED",
    "REHEARSED",
    "SearchResult",
    "lifts",
    "pareto",
    "refutable",
    "rehearsal_of",
    "rehearsed_points",
    "search",
]


MEMORY = "memory"
HOST_MEMORY = "host_memory"  # fits the devices, not the node
OUTPACED = "outpaced"
BROKEN_ESTIMATE = "broken_estimate"  # a law of memory is broken: a bug of llmlaunch
EXACT = 6  # the chosen layout and the runners-up a plan shows
EQUAL = 1e-3  # shares of a step that no model of time can tell apart
RANKED = 64  # sorting a million layouts takes longer than pricing them, and few look past the first


@dataclass(frozen=True)
class SearchResult:
    """The legal layouts with their worst rank and step time, by column.

    `first` are the first of the ranking, `order` all of it: the safe ones, fastest first, or, where none is safe, all
    legal ones by how full they make the fullest memory, of a device or of a node (`filled`). Of what is `searched`, all
    are safe or `refused` for one reason; OUTPACED are uneven stages that cannot be among the EXACT fastest.
    `rehearsed` are the layouts of which a rehearsal decides, by their place among the columns.
    """

    points: Points
    safe: NDArray[np.bool_]
    filled: NDArray[np.float64]
    first: NDArray[np.int64]
    searched: int
    refused: Mapping[str, int]
    rules: Sequence[Rule]
    rehearsed: Mapping[int, Rehearsal] = field(default_factory=dict)

    @cached_property
    def layouts(self) -> LayoutColumns:
        return self.points.layouts

    @cached_property
    def order(self) -> NDArray[np.int64]:
        return _ranking(self.points, self.safe, self.filled, len(self.points))

    @property
    def device_bytes(self) -> NDArray[np.float64]:
        return self.points.rows.device_bytes

    @property
    def worst_pipeline_rank(self) -> NDArray[np.int64]:
        return self.points.rows.worst_pipeline_rank

    @property
    def step_seconds(self) -> NDArray[np.float64]:
        return self.points.rows.step_seconds

    def candidate(self, recipe: Recipe, place: int) -> Candidate:
        """The layout at `place` of the ranking."""
        return self.at(recipe, int(self.first[place]))

    def at(self, recipe: Recipe, index: int) -> Candidate:
        """The layout at `index` of the columns."""
        points, seconds = self.points, float(self.step_seconds[index])
        said = recipe_with_techniques(recipe, *points.words(index))
        return Candidate(
            layout=points.layout(index),
            device_bytes=int(points.rows.device_bytes[index]),
            worst_pipeline_rank=int(points.rows.worst_pipeline_rank[index]),
            step_seconds=seconds,
            tokens_per_second_per_gpu=recipe.workload.tokens_per_step / seconds / recipe.world_size,
            techniques=said.techniques,
            gradient_dtype=said.training.gradient_dtype,
        )


def search(setting: Setting) -> SearchResult:
    """Price every legal layout. Nothing is sampled: `check` and `plan` see the same space.

    Raises:
        UserError: the recipe asks for what its backend cannot do whatever the layout.
    """
    recipe, backend = setting.recipe, setting.backend
    space, words = backend.space(recipe), technique_space(recipe, backend)
    rules = backend.rules(recipe)
    of_words = [rule for rule in rules if rule.of_techniques]
    refused: Counter[str] = Counter()
    even = _legal(recipe, rules, enumerate_splits(recipe, space), len(words.running) * len(words.held), refused)
    points, by_words = price(setting, even, words, of_words)
    fixed = words.without_amounts
    uneven = _legal(recipe, rules, enumerate_uneven(recipe, space), len(fixed) * len(words.held), refused)
    opened = open_uneven(setting, uneven, words, of_words, _fastest(setting, points))
    points = points.beside(opened.splits, opened.blocks)
    filled = np.maximum(
        points.rows.device_bytes / max(setting.limit.limit_bytes, 1),
        points.rows.host_bytes / max(setting.host_limit.limit_bytes, 1),
    )
    rehearsed = rehearsed_points(setting.lessons.rehearsals, recipe, points)
    safe, by_memory = _judged(setting, points, rehearsed, filled)
    refused = refused + by_words + opened.refused + by_memory
    refused += Counter({MEMORY: opened.overfull, OUTPACED: opened.outpaced})
    return SearchResult(
        points=points,
        safe=safe,
        filled=filled,
        first=_ranking(points, safe, filled, RANKED),
        searched=sum(refused.values()) + int(np.count_nonzero(safe)),
        refused=dict(refused),
        rules=rules,
        rehearsed=rehearsed,
    )


def _judged(
    setting: Setting, points: Points, rehearsed: Mapping[int, Rehearsal], filled: NDArray[np.float64]
) -> tuple[NDArray[np.bool_], Counter[str]]:
    """Which points are safe, by the estimate, and by a rehearsal where there is one; how many of the others are refused
    for what. What a rehearsal refuses counts as `filled` as it showed; an estimate that breaks a law it cannot mend."""
    rows = points.rows
    fits, of_node = rows.device_bytes <= setting.limit.limit_bytes, rows.host_bytes <= setting.host_limit.limit_bytes
    safe = is_safe(setting, rows.device_bytes, rows.host_bytes)
    broken = is_impossible(np.maximum(rows.device_bytes, rows.host_bytes))
    refuted, lifted = np.zeros(len(points), dtype=np.bool_), np.zeros(len(points), dtype=np.bool_)
    for row, one in rehearsed.items():
        refuted[row] = not one.safe
        lifted[row] = lifts(one, setting.limit) and of_node[row] and not broken[row]
        if not one.safe:
            filled[row] = max(filled[row], one.device_bytes / max(setting.limit.limit_bytes, 1), 1.0)
    refused = {
        MEMORY: int(np.count_nonzero(~fits & ~lifted & ~broken)),
        HOST_MEMORY: int(np.count_nonzero(fits & ~safe & ~broken)),
        BROKEN_ESTIMATE: int(np.count_nonzero(broken)),
        REHEARSED: int(np.count_nonzero(safe & refuted)),
    }
    return (safe | lifted) & ~refuted, Counter(refused)


def _legal(
    recipe: Recipe, rules: Sequence[Rule], splits: LayoutColumns, ways: int, refused: Counter[str]
) -> LayoutColumns:
    """The splits that pass the rules that look at nothing else; what the others fail is added to `refused`, once for
    each way they would have been tried."""
    of_splits = [rule for rule in rules if not rule.of_techniques]
    failed = first_failed(of_splits, situation(recipe, splits))
    for key, count in refusal_counts(of_splits, failed).items():
        refused[key] += ways * count
    return splits.take(np.flatnonzero(failed < 0))


def _fastest(setting: Setting, points: Points) -> NDArray[np.float64]:
    """Step times of the EXACT fastest safe points, infinite where there are fewer; of more where a rehearsal may refuse
    some of them."""
    exact = EXACT + refutable(setting.lessons.rehearsals, setting.recipe)
    safe = is_safe(setting, points.rows.device_bytes, points.rows.host_bytes)
    seconds = np.concatenate([points.rows.step_seconds[safe], np.full(exact, np.inf)])
    return np.sort(np.partition(seconds, exact)[:exact] if len(seconds) > exact else seconds)


def _ranking(points: Points, safe: NDArray[np.bool_], filled: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """The first `count` safe points by step time; where none is safe, of all by how full the fullest memory is. Equals
    by plainness: even stages, fewer words (those offered first), the smaller split, then the other figure, so that ties
    never wobble. The plainest of those within EQUAL of the first is put before them."""
    rows, splits = points.rows, points.splits
    index = np.flatnonzero(safe)
    by, then = (rows.step_seconds, filled) if len(index) else (filled, rows.step_seconds)
    if not len(index):
        index = np.arange(len(points))
    if len(index) > count:
        near = by[index]
        index = index[near <= np.partition(near, count)[count] + 1e-9]
    split = rows.split[index]
    size = (splits.tensor * splits.pipeline * splits.context * splits.virtual_pipeline)[split]
    plain = (index, then[index], size, rows.held[index], rows.running[index], splits.partition[split] != 0)
    order = np.lexsort((*plain, np.round(by[index], 12)))
    if not len(order):
        return index
    equal = order[by[index[order]] <= by[index[order[0]]] * (1.0 + EQUAL)]
    plainest = equal[np.lexsort([key[equal] for key in plain])[0]]
    first: NDArray[np.int64] = index[np.concatenate([[plainest], order[order != plainest]])][:count]
    return first


def pareto(found: SearchResult) -> NDArray[np.int64]:
    """Rows of `found`, fastest first: each next one is slower and leaves more free. Of layouts equal in both the first
    stands for all."""
    safe = np.flatnonzero(found.safe)
    filled = found.device_bytes[safe]
    order = np.lexsort((safe, filled, np.round(found.step_seconds[safe], 12)))
    filled = filled[order]
    least_before = np.concatenate([[np.inf], np.minimum.accumulate(filled)])[: len(filled)]
    front: NDArray[np.int64] = safe[order[filled < least_before]]
    return front


REHEARSED = "rehearsed"  # why a layout is refused


def rehearsed_points(rehearsals: Iterable[Rehearsal], recipe: Recipe, points: Points) -> Mapping[int, Rehearsal]:
    """By their place among `points` the layouts that were rehearsed as they are, with the same words and workload."""
    found: dict[int, Rehearsal] = {}
    for one in rehearsals:
        for row in np.flatnonzero(_split_alike(points, one.layout)[points.rows.split]):
            said = recipe_with_techniques(recipe, *points.words(int(row)))
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
