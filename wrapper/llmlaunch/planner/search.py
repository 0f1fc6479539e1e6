"""Search the whole space of a recipe: refuse with a reason, keep the safe layouts, rank them by step time.

A rehearsal of a layout goes before its estimate, both ways: it refuses what the estimate lets pass, and it lets pass
what the estimate refuses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from itertools import product

import numpy as np

from llmlaunch.calibration.lessons import MeasuredStep, Rehearsal
from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn
from llmlaunch.frameworks.base import Backend
from llmlaunch.frozen import frozen
from llmlaunch.layout import LayoutColumns, Rule, refusal_counts
from llmlaunch.memory.guard import IMPOSSIBLE_BYTES
from llmlaunch.planner.legality import TechniqueLegality, first_failed, situation, technique_legality
from llmlaunch.planner.memory_bounds import least_state_bytes_of
from llmlaunch.planner.points import (
    ANYWHERE,
    GatheredRows,
    Incumbents,
    Points,
    Reach,
    Rows,
    points_of,
    refuted,
    rehearsals_of_points,
    same_split,
    same_techniques,
)
from llmlaunch.planner.preference import preference_factor, prices_at
from llmlaunch.planner.pricing import Offer, Priced, filled_share, price, price_rows, roomiest
from llmlaunch.planner.search_space import (
    Candidate,
    FasterLayout,
    HabitPrice,
    TechniqueSpace,
    all_techniques,
    enumerate_splits,
    enumerate_uneven,
    technique_space,
)
from llmlaunch.planner.setting import SPLIT_SHARE, BudgetSpent, Setting, count_candidates
from llmlaunch.planner.technique_batches import is_safe
from llmlaunch.planner.uneven_search import UnevenLayouts, search_uneven
from llmlaunch.recipe.types import Recipe
from llmlaunch.verdicts import TIGHT

# Why a layout is refused, beside the keys of the backend's rules.
MEMORY = "memory"
HOST_MEMORY = "host_memory"  # fits the devices, not the node
OUTPACED = "outpaced"
BROKEN_ESTIMATE = "broken_estimate"  # a law of memory is broken: a bug of llmlaunch
REHEARSED = "rehearsed"

EQUAL = 5e-3  # shares of a step that no model of time can tell apart
EXACT = 6  # the chosen layout and the runners-up a plan shows
RANKED = 64  # sorting a million layouts takes longer than pricing them, and few look past the first


@frozen
class LegalSplits:
    """Splits that pass the rules that look at sizes alone, which techniques are legal with them, and what the rules
    refuse, once for each combination of techniques. `asked` is how many splits the rules looked at."""

    splits: LayoutColumns
    legality: TechniqueLegality
    refused: Counter[str]
    asked: int


@frozen
class LegalLayouts:
    """What is legal of a recipe, whatever is known of its memory and time: what searches of it in other settings have
    in common."""

    recipe: Recipe
    rules: Sequence[Rule]
    techniques: TechniqueSpace
    even: LegalSplits
    uneven: LegalSplits


@frozen
class SearchResult:
    """The legal layouts with their worst rank and step time, by column.

    `first` is the beginning of the ranking: the safe points by `preferred_seconds`, step time with what the preference
    adds to it, or, where none is safe, all legal ones by how full they make the fullest memory, of a device or of a
    node. Of the `searched` layouts, each is safe or `refused` for one reason; OUTPACED are those that cannot be among
    the exact first. `gave_way` is the point that the ranking alone puts first, where another one is first for its
    head-room (`headroom.py`). `rehearsed` maps point indices to the rehearsals that decide about them, `measured` to
    the runs of them that were timed. Step times are `pace` times those that were ranked (`headroom.py`). `legal` are
    the layouts that were searched, for another search of the same recipe.
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
    gave_way: int | None = None
    pace: float = 1.0
    legal: LegalLayouts | None = None

    @property
    def any_legal(self) -> bool:
        """Return whether any layout passes every rule, priced or not."""
        return len(self.points) > 0 or any(self.refused.get(reason, 0) for reason in (MEMORY, OUTPACED))

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
        step, state = points.techniques(index)
        return Candidate(
            layout=points.layout(index),
            device_bytes=int(points.rows.device_bytes[index]),
            worst_pipeline_rank=int(points.rows.worst_pipeline_rank[index]),
            step_seconds=seconds,
            tokens_per_second_per_gpu=recipe.workload.tokens_per_step / seconds / recipe.world_size,
            techniques=all_techniques(recipe, step, state),
            gradient_dtype=state.gradient_dtype,
        )


def faster_layout(result: SearchResult, recipe: Recipe) -> FasterLayout | None:
    """Return the fastest safe layout where the preference chose another one that takes longer by more than EQUAL,
    whether or not that one gave way for its head-room."""
    safe, chosen = np.flatnonzero(result.safe), int(result.first[0])
    if not len(safe):
        return None
    preferred = chosen if result.gave_way is None else result.gave_way
    fastest = int(safe[np.argmin(result.step_seconds[safe])])
    gain, before = (float(result.step_seconds[at] / result.step_seconds[fastest]) - 1.0 for at in (chosen, preferred))
    if min(gain, before) <= EQUAL:
        return None
    paid = {habit.name: price for habit, price in prices_at(recipe, result.points, preferred)}
    counted = [
        HabitPrice(habit.name, price, habit.reason)
        for habit, price in prices_at(recipe, result.points, fastest)
        if price > paid.get(habit.name, 0.0)
    ]
    return FasterLayout(result.at(recipe, fastest), gain, tuple(sorted(counted, key=lambda habit: -habit.price)))


def search(
    setting: Setting,
    whole: bool = False,
    exact: int = EXACT,
    reach: Reach = ANYWHERE,
    safe_alone: bool = False,
    legal: LegalLayouts | None = None,
) -> SearchResult:
    """Search every legal layout; nothing is sampled, so `check` and `plan` see the same space.

    Layouts that provably cannot be among the `exact` first of the ranking are not priced, unless the `whole` space is
    asked for: then every legal layout of even stages is a point. Who asks for the first alone has it sooner, and so has
    who asks for what is `safe_alone`: where nothing is safe, the layouts closest to it are then not looked for. Where
    `reach` leaves something out, the safe layouts within it are ranked alone, and there may be none. `legal` is that of
    an earlier search of the same recipe, so that it need not be worked out again.

    Raises:
        UserError: the recipe asks for what its backend cannot do whatever the layout.
    """
    exact += sum(step.decides for step in setting.lessons.measured_steps)  # runs may have shown some to be slower
    incumbents = Incumbents(exact, partial(_keys, setting, reach), whole, reach, safe_alone)
    try:
        return _searched(setting, incumbents, exact, legal)
    except BudgetSpent as spent:
        spent.safe_layout = None if incumbents.first_safe is None else incumbents.first_safe.layout(0)
        raise


def _searched(setting: Setting, incumbents: Incumbents, exact: int, legal: LegalLayouts | None) -> SearchResult:
    """Return the result of a search whose `incumbents` say what is within reach."""
    recipe, whole, reach = setting.recipe, incumbents.whole, incumbents.reach
    if legal is None or legal.recipe is not recipe:
        legal = _legal_layouts(recipe, setting.backend)
    even = _offer(setting, legal, legal.even)
    priced = price(even, incumbents)
    incumbents.whole = False  # of uneven stages the fastest alone are solved
    uneven = search_uneven(_offer(setting, legal, legal.uneven), incumbents)
    if not (whole or incumbents.safe_alone or incumbents.any_safe):
        priced = _roomiest(even, priced.rows.rows, exact)
    priced = _with_evidence(even, priced)
    points = _points_with(even, priced.rows, uneven)
    filled = filled_share(setting, points.rows)
    rehearsed = rehearsals_of_points(setting, points)
    measured = points_of(setting.lessons.measured_steps, recipe, points)
    points = _with_measured_steps(points, measured)
    safe, by_memory = _judged(setting, points, rehearsed, filled)
    preferred = preferred_seconds(recipe, points)
    ranked = safe & (points.rows.step_seconds <= reach.most_seconds)
    refused = legal.even.refused + legal.uneven.refused + by_memory
    refused += Counter({MEMORY: priced.overfull + uneven.overfull, OUTPACED: priced.outpaced + uneven.outpaced})
    return SearchResult(
        points=points,
        safe=safe,
        first=_ranking(points, preferred, ranked, filled, safe_alone=not reach.everything),
        preferred_seconds=preferred,
        searched=sum(refused.values()) + int(np.count_nonzero(safe)),
        refused=dict(refused),
        rules=legal.rules,
        rehearsed=rehearsed,
        measured=measured,
        legal=legal,
    )


def _legal_layouts(recipe: Recipe, backend: Backend) -> LegalLayouts:
    """Return what is legal of a recipe. Raises UserError where its backend cannot do it whatever the layout."""
    space, techniques, rules = backend.space(recipe), technique_space(recipe, backend), backend.rules(recipe)
    every = range(len(techniques.step))
    even = _legal_splits(recipe, rules, enumerate_splits(recipe, space), techniques, every)
    without = techniques.step_without_amounts
    uneven = _legal_splits(recipe, rules, enumerate_uneven(recipe, space), techniques, without)
    return LegalLayouts(recipe, rules, techniques, even, uneven)


def _roomiest(even: Offer, rows: Rows, exact: int) -> Priced:
    """Return the points that fill memory least: as many as must be exact, and those among `rows` that a rehearsal
    refutes, which may fill it less than any that is safe."""
    points = Points(even.splits, even.space.step, even.space.state, rows)
    return Priced(roomiest(even, exact + int(np.count_nonzero(refuted(even.setting, points)))), overfull=0, outpaced=0)


def _with_measured_steps(points: Points, measured: Mapping[int, MeasuredStep]) -> Points:
    """Return the points with the step times of those that ran, as measured where that decides."""
    decisive = {row: step.step_seconds for row, step in measured.items() if step.decides}
    if not decisive:
        return points
    seconds = points.rows.step_seconds.copy()
    for row, step_seconds in decisive.items():
        seconds[row] = step_seconds
    return replace(points, rows=replace(points.rows, step_seconds=seconds))


def _with_evidence(offer: Offer, priced: Priced) -> Priced:
    """Add to the rows the points that runs and rehearsals were of, which may be better than any bound says. They count
    as priced, and no more among those that were not."""
    setting, space, rows, added = offer.setting, offer.space, priced.rows, 0
    evidence: list[Rehearsal | MeasuredStep] = [*setting.lessons.rehearsals, *setting.lessons.measured_steps]
    for of_layout in evidence:
        splits = np.flatnonzero(same_split(offer.splits, of_layout.layout))
        pairs = product(enumerate(space.step), space.state)
        steps = {i for (i, step), state in pairs if same_techniques(setting.recipe, step, state, of_layout)}
        if len(splits) and steps:
            more = price_rows(replace(offer, least_bytes=0.0 * offer.least_bytes), splits, sorted(steps))
            known = set(_identities(rows.rows.take(np.isin(rows.rows.split, splits))))
            fresh = [place not in known for place in _identities(more)]
            rows.add(more.take(np.array(fresh, dtype=np.bool_)))
            added += sum(fresh)
    outpaced = max(priced.outpaced - added, 0)
    overfull = max(priced.overfull - (added - (priced.outpaced - outpaced)), 0)
    return replace(priced, overfull=overfull, outpaced=outpaced)


def _identities(rows: Rows) -> Iterator[tuple[int, ...]]:
    """Yield of each row the numbers in which any two points of even stages differ."""
    of_techniques = rows.step_techniques, rows.state_techniques
    columns = (rows.split, *of_techniques, rows.recompute_layers, rows.offload_layers)
    return zip(*(column.tolist() for column in columns), strict=True)


def _points_with(even: Offer, rows: GatheredRows, uneven: UnevenLayouts) -> Points:
    """Return the points of even and of uneven stages, whose blocks are over splits of their own."""
    splits = LayoutColumns.joined([even.splits, *uneven.splits])
    start = len(even.splits)
    for of_block, block in zip(uneven.splits, uneven.blocks, strict=True):
        rows.add(replace(block, split=block.split + start))
        start += len(of_block)
    return Points(splits, even.space.step, even.space.state, rows.rows)


def preferred_seconds(recipe: Recipe, points: Points) -> FloatColumn:
    """Return what safe points are ranked by: step time with what the preference adds to it, so that a lower bound of
    step time is one of this."""
    return points.rows.step_seconds * preference_factor(recipe, points)


def _keys(setting: Setting, reach: Reach, points: Points) -> FloatColumn:
    """Return what puts others out of reach: nothing where a rehearsal refutes what the estimate lets pass, or where a
    step takes too long to be within `reach`."""
    out = refuted(setting, points) | (points.rows.step_seconds > reach.most_seconds)
    return np.where(out, np.inf, preferred_seconds(setting.recipe, points))


def _legal_splits(
    recipe: Recipe, rules: Sequence[Rule], splits: LayoutColumns, techniques: TechniqueSpace, steps: Sequence[int]
) -> LegalSplits:
    """Return the splits that pass the rules that look at sizes alone, with the techniques at `steps`."""
    plain_steps, asked = sum(not techniques.switches[i] for i in steps), len(splits)
    size_rules = [rule for rule in rules if not rule.of_techniques]
    count_candidates(SPLIT_SHARE * asked)
    failed = first_failed(size_rules, situation(recipe, splits))
    counts = refusal_counts(size_rules, failed)
    refused = Counter({key: plain_steps * len(techniques.state) * count for key, count in counts.items()})
    splits = splits.take(np.flatnonzero(failed < 0))
    technique_rules = [rule for rule in rules if rule.of_techniques]
    legality = technique_legality(techniques, splits, technique_rules, steps)
    return LegalSplits(splits, legality, refused + legality.refused, asked)


def _offer(setting: Setting, legal: LegalLayouts, of: LegalSplits) -> Offer:
    """Return legal splits and techniques to be priced in a setting."""
    space = legal.techniques
    return Offer(setting, of.splits, space, of.legality, least_state_bytes_of(setting, space, of.splits))


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
    refused_rows, lifted = np.zeros(len(points), dtype=np.bool_), np.zeros(len(points), dtype=np.bool_)
    for row, rehearsal in rehearsed.items():
        refused_rows[row] = rehearsal.refuses(limit.limit_bytes)
        lifted[row] = rehearsal.allows(limit.limit_bytes) and fits_node[row] and not broken[row]
        if refused_rows[row]:
            filled[row] = max(filled[row], rehearsal.device_bytes / max(limit.limit_bytes, 1), 1.0)
    beyond = ~fits & ~lifted & ~broken
    tight = beyond & fits_node & (rows.device_bytes <= limit.most_bytes)
    refused = {
        TIGHT: int(np.count_nonzero(tight)),
        MEMORY: int(np.count_nonzero(beyond & ~tight)),
        HOST_MEMORY: int(np.count_nonzero(fits & ~safe & ~broken)),
        BROKEN_ESTIMATE: int(np.count_nonzero(broken)),
        REHEARSED: int(np.count_nonzero(safe & refused_rows)),
    }
    return (safe | lifted) & ~refused_rows, Counter(refused)


def _ranking(
    points: Points, preferred: FloatColumn, safe: BoolColumn, filled: FloatColumn, safe_alone: bool = False
) -> IntColumn:
    """Return the first RANKED safe points by preferred seconds; where none is safe, of all points by how full the
    fullest memory is, or nothing if the safe ones alone are of interest (`safe_alone`). Ties never wobble: even stages,
    the techniques offered first, the smaller split, then the other figure decide them."""
    rows, splits = points.rows, points.splits
    index = np.flatnonzero(safe)
    by, then = (preferred, filled) if len(index) else (filled, preferred)
    if not len(index) and not safe_alone:
        index = np.arange(len(points))
    if len(index) > RANKED:
        near = by[index]
        index = index[near <= np.partition(near, RANKED)[RANKED] + 1e-9]
    split = rows.split[index]
    size = (splits.tensor * splits.pipeline * splits.context * splits.virtual_pipeline)[split]
    ties = (
        index,
        split,
        then[index],
        size,
        rows.state_techniques[index],
        rows.step_techniques[index],
        splits.partition[split] != 0,
    )
    first: IntColumn = index[np.lexsort((*ties, np.round(by[index], 12)))][:RANKED]
    return first
