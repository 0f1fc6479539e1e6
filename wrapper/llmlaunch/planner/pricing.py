"""Bytes and seconds of every legal split with every combination of techniques, solved amounts included: of all, or of
those that bounds leave within reach (`technique_batches` says what is priced together).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn
from llmlaunch.frameworks.base import StepTechniques
from llmlaunch.frozen import frozen
from llmlaunch.layout import LayoutColumns, Rule
from llmlaunch.memory.grouped_pricing import distinct_states
from llmlaunch.planner.legality import TechniqueLegality, technique_legality
from llmlaunch.planner.memory_bounds import (
    LeastFactors,
    LeastSeconds,
    MemoryBounds,
    by_cost,
    passes_with,
    scouts,
    switch_sets,
)
from llmlaunch.planner.points import NO_ROWS, GatheredRows, Incumbents, Points, Rows, join_rows
from llmlaunch.planner.search_space import TechniqueSpace
from llmlaunch.planner.setting import SPLIT_SHARE, WHOLE_SHARE, Setting, count_candidates
from llmlaunch.planner.technique_batches import (
    ModelStateBatch,
    TechniqueBatch,
    alike_steps,
    apply_alike,
    fewest_amounts,
    group_equal,
    is_safe,
    state_batches,
)
from llmlaunch.timing.step import UpdateSeconds

SPARE, OVERFULL = "spare", "overfull"  # why layouts were not priced
AT_ONCE = 1024  # splits priced first; four times as many each time that nothing puts the others out of reach
WHOLE_AT_ONCE = 6144  # splits priced together where all are: their columns stay in the processor's cache
PAIRS_AT_ONCE = 16384  # splits and techniques priced together
ROOMIEST = 64  # splits priced first where nothing is safe
SCOUTS = 12  # step techniques tried first, with those splits
SCOUTED = 200_000  # splits times step techniques that are worth a look ahead


@frozen
class Priced:
    """The rows of a search's splits, and how many legal layouts were not priced: because their model states alone
    exceed device memory, or because they take longer than the incumbents even at best."""

    rows: GatheredRows
    overfull: int
    outpaced: int


@frozen
class Offer:
    """What a search prices: legal splits, techniques, which of them are legal together, and the least device bytes of
    the model states (state techniques x splits)."""

    setting: Setting
    splits: LayoutColumns
    space: TechniqueSpace
    legality: TechniqueLegality
    least_bytes: FloatColumn

    @cached_property
    def fits(self) -> BoolColumn:
        """Whether the model states alone leave the device memory within its limit (state techniques x splits)."""
        return np.less_equal(self.least_bytes, self.setting.limit.limit_bytes)

    @cached_property
    def factors(self) -> LeastFactors:
        return LeastFactors(self.setting.recipe, self.space, self.splits)

    def allowed(self, step: int, states: Sequence[int], rows: IntColumn) -> BoolColumn:
        """Whether each of `rows` may be priced with each of `states` (states x rows)."""
        return np.array([self.legality.legal(step, state)[rows] & self.fits[state, rows] for state in states])

    def allowed_with(self, steps: IntColumn, states: Sequence[int], rows: IntColumn) -> BoolColumn:
        """Whether each of `rows` may be priced with each of `steps` and of `states` (states x steps x rows)."""
        used, place = np.unique(self.legality.mask_of[steps][:, list(states)].T, return_inverse=True)
        masks = np.array([self.legality.masks[index][rows] for index in used.tolist()])
        allowed: BoolColumn = masks[place.reshape(len(states), len(steps))] & self.fits[states][:, None, rows]
        return allowed

    def counts(self, steps: Sequence[int]) -> tuple[int, int]:
        """Return how many layouts of these steps may be priced, and how many are legal but overfull."""
        kinds = Counter((int(self.legality.mask_of[i, j]), j) for i in steps for j in range(len(self.space.state)))
        allowed = overfull = 0
        for (mask, state), times in kinds.items():
            legal = self.legality.masks[mask]
            fitting = int(np.count_nonzero(legal & self.fits[state]))
            allowed += times * fitting
            overfull += times * (int(np.count_nonzero(legal)) - fitting)
        return allowed, overfull

    def candidates(self, steps: Sequence[int]) -> IntColumn:
        """Return the splits that may be priced with any of these steps."""
        used = set(self.legality.mask_of[list(steps)].flat)
        legal = np.any([self.legality.masks[index] for index in used], axis=0)
        return np.flatnonzero(legal & self.fits.any(axis=0))


def price_all(setting: Setting, splits: LayoutColumns, space: TechniqueSpace, rules: Sequence[Rule]) -> Points:
    """Return the points of all `splits` with all techniques that the `rules`, which look at them, allow."""
    steps = range(len(space.step))
    legality = technique_legality(space, splits, rules, steps)
    offer = Offer(setting, splits, space, legality, np.zeros((len(space.state), len(splits))))
    return Points(splits, space.step, space.state, price_rows(offer, np.arange(len(splits)), steps))


def price(offer: Offer, incumbents: Incumbents) -> Priced:
    """Price the candidates that are within reach of the `incumbents`, which the safe ones join.

    The splits with the least seconds come first, a few techniques before all of them, so that good incumbents leave
    most of the others out of reach before anything of theirs is priced.
    """
    space, steps = offer.space, by_cost(offer.space)
    allowed, overfull = offer.counts(steps)
    left_out: Counter[str] = Counter()
    if incumbents.whole:
        offer = replace(offer, least_bytes=np.zeros_like(offer.least_bytes))
        rows, sets = GatheredRows(allowed + overfull), switch_sets(space)
        in_turn = sorted(steps, key=lambda i: sets.index(space.step[i].keeping_all))  # each set's share most columns
        for start in range(0, len(offer.splits), WHOLE_AT_ONCE):
            now = np.arange(start, min(start + WHOLE_AT_ONCE, len(offer.splits)))
            left_out += _price_rows(offer, now, in_turn, incumbents, rows)
        return Priced(rows, 0, allowed + overfull - left_out[SPARE] - len(rows))
    rows, at_once = GatheredRows(), AT_ONCE
    least, waiting = np.full(len(offer.splits), np.inf), offer.candidates(steps)
    bounds = LeastSeconds(offer.setting, space, offer.splits)
    seconds = bounds.of_any(waiting)
    least[waiting] = seconds * offer.factors.of_splits()[waiting]
    waiting = waiting[incumbents.in_time(seconds)]
    waiting = waiting[np.argsort(least[waiting], kind="stable")]
    if len(steps) * len(waiting) > SCOUTED:
        with incumbents.looking_ahead():
            _price_rows(offer, waiting[:AT_ONCE], scouts(space, steps, SCOUTS), incumbents, GatheredRows())
            _look_for_safe(offer, waiting, incumbents)
        if not incumbents.any_safe:
            return Priced(rows, allowed + overfull, 0)
    while len(waiting := waiting[incumbents.in_reach(least[waiting])]):
        now, waiting, at_once = waiting[:at_once], waiting[at_once:], 4 * at_once
        left_out += _price_rows(offer, now, steps, incumbents, rows)
    return Priced(rows, overfull + left_out[OVERFULL], allowed - sum(left_out.values()) - len(rows))


def _look_for_safe(offer: Offer, waiting: IntColumn, incumbents: Incumbents) -> None:
    """Price the `waiting` splits with the step techniques that may spare memory until something is safe: where these
    are not, no switch makes a layout safe, and none needs to be priced."""
    steps = [i for i in by_cost(offer.space) if i in offer.space.sparing_steps]
    for start in range(0, len(waiting), AT_ONCE):
        if incumbents.any_safe:
            return
        _price_rows(offer, waiting[start : start + AT_ONCE], steps, incumbents, GatheredRows())


def roomiest(offer: Offer, exact: int) -> GatheredRows:
    """Return points of which the `exact` first fill memory least of all candidates, for a search in which nothing is
    safe. Splits whose model states alone need more than those are not priced. In a large space a few techniques that
    spare most say which of the splits with the least model states are roomiest, and these are priced with all that may
    spare memory."""
    space, found = offer.space, GatheredRows()
    offered = replace(offer, least_bytes=np.zeros_like(offer.least_bytes))
    least = offer.least_bytes.min(axis=0, initial=np.inf) / max(offer.setting.limit.limit_bytes, 1)
    steps = space.sparing_steps
    rows = offered.candidates(steps)
    rows = rows[np.argsort(least[rows], kind="stable")]
    if len(rows) * len(steps) <= SCOUTED:
        found.add(_roomiest_of(offered, rows, least, steps, exact))
    else:
        ahead = _roomiest_of(offered, rows[: 5 * ROOMIEST], least, scouts(space, steps, SCOUTS), exact)
        order = np.argsort(filled_share(offer.setting, ahead), kind="stable")
        best = np.array(list(dict.fromkeys(ahead.split[order].tolist()))[:ROOMIEST], dtype=np.int64)
        found.add(price_rows(offered, best, steps))
    return found


def _roomiest_of(offer: Offer, waiting: IntColumn, least: FloatColumn, steps: Sequence[int], exact: int) -> Rows:
    """Price the `waiting` splits, the least bounds first, until none can be among the `exact` roomiest."""
    rows, fullest, at_once = NO_ROWS, np.inf, ROOMIEST
    while len(waiting := waiting[least[waiting] <= fullest]):
        now, waiting = waiting[:at_once], waiting[at_once:]
        rows = join_rows([rows, price_rows(offer, now, steps)])
        filled = filled_share(offer.setting, rows)
        fullest = float(np.partition(filled, exact)[exact]) if len(filled) > exact else np.inf
        at_once *= 4
    return rows


def filled_share(setting: Setting, rows: Rows) -> FloatColumn:
    """Return how full each candidate makes the fuller of a device's and a node's memory, as a share of its limit."""
    device = rows.device_bytes / max(setting.limit.limit_bytes, 1)
    filled: FloatColumn = np.maximum(device, rows.host_bytes / max(setting.host_limit.limit_bytes, 1))
    return filled


def price_rows(offer: Offer, rows: IntColumn, steps: Sequence[int]) -> Rows:
    """Return the points of some splits with some step techniques, whatever their bounds say."""
    priced = GatheredRows()
    _price_rows(offer, rows, steps, Incumbents.of_whole(), priced)
    return priced.rows


def _price_rows(
    offer: Offer, rows: IntColumn, steps: Sequence[int], incumbents: Incumbents, priced: GatheredRows
) -> Counter[str]:
    """Add to `priced` some splits with some techniques. Return how many layouts with a solved amount are the same as
    those without (SPARE), and how many cannot hold their layers (OVERFULL)."""
    setting, space, splits = offer.setting, offer.space, offer.splits.take(rows)
    count_candidates(SPLIT_SHARE * len(rows))
    left_out: Counter[str] = Counter()
    distinct, state_of = distinct_states(setting.job, splits)
    keeping: dict[StepTechniques, FloatColumn] = {}
    for indices in group_equal(setting, space):
        states = state_batches(setting, space, indices, distinct)
        update = UpdateSeconds.stacked([state.update for state in states])
        batches = _batches_in_reach(offer, rows, steps, indices, state_of, incumbents, left_out, keeping)
        for batch, allowed, factors in batches:
            for block, unneeded in _blocks(batch, states, update, allowed, factors, incumbents):
                safe = block.take(is_safe(setting, block.device_bytes, block.host_bytes))
                incumbents.add(Points(offer.splits, space.step, space.state, safe))
                priced.add(block)
                left_out[SPARE] += unneeded
    return left_out


# Candidates, whether they are allowed with each of some state techniques, and what the ranking multiplies their seconds
# by at least (both states x candidates).
Batch = tuple[TechniqueBatch, BoolColumn, FloatColumn]


def _batches_in_reach(
    offer: Offer,
    rows: IntColumn,
    steps: Sequence[int],
    states: Sequence[int],
    state_of: IntColumn,
    incumbents: Incumbents,
    left_out: Counter[str],
    keeping: dict[StepTechniques, FloatColumn],
) -> Iterator[Batch]:
    """Yield the splits with the step techniques that are legal and within reach by lower bounds, and may fit memory as
    soon as something is known to be safe. `keeping` are the seconds of the splits with techniques that keep all
    activations, whatever the state techniques."""
    setting, space, splits = offer.setting, offer.space, offer.splits.take(rows)
    memory = MemoryBounds(setting, space, splits, states) if incumbents.unsafe_are_lost else None
    for alike in alike_steps(space, steps):
        allowed, first = offer.allowed_with(alike, states, rows), space.step[int(alike[0])]
        if first.keeping_all not in keeping:
            keeping[first.keeping_all] = passes_with(setting, space, first.keeping_all, splits).total
        least = keeping[first.keeping_all] * offer.factors.of_steps(rows, alike)
        near = allowed.any(axis=0) & incumbents.in_reach(least) & incumbents.in_time(keeping[first.keeping_all])
        if memory is not None and np.any(near):
            some = np.flatnonzero(near.any(axis=0))
            fits = memory.may_fit(alike, some)
            left_out[OVERFULL] += int(np.count_nonzero(allowed[:, :, some] & near[:, some] & ~fits))
            near[:, some] &= fits
        step, row = np.nonzero(near)
        for start in range(0, len(step), PAIRS_AT_ONCE):
            i, j = alike[step[start : start + PAIRS_AT_ONCE]], row[start : start + PAIRS_AT_ONCE]
            job, layouts = apply_alike(setting, space, i, states[0], splits.take(j))
            searched = first.keeping_all in space.steps
            batch = TechniqueBatch(setting, job, i, rows[j], layouts, state_of[j], first.solved, searched)
            factors = np.array([offer.factors.of(rows[j], i, state) for state in states])
            yield batch, allowed[:, step[start : start + PAIRS_AT_ONCE], j], factors


def _blocks(
    batch: TechniqueBatch,
    states: Sequence[ModelStateBatch],
    update: UpdateSeconds,
    allowed: BoolColumn,
    factors: FloatColumn,
    incumbents: Incumbents,
) -> Iterator[tuple[Rows, int]]:
    """Yield for each of the `states`, whose update is in `update`, the rows of a batch that are allowed with it (states
    x rows) and within reach by their seconds times their `factors`, and how many layouts with a solved amount need none
    of it. Time comes first: it costs less than memory, and leaves few."""
    batch = replace(batch, timed=batch.passes)
    seconds = batch.step_seconds(update)
    near = allowed & incumbents.in_reach(seconds * factors) & incumbents.in_time(seconds)
    some = np.flatnonzero(near.any(axis=0))
    if not len(some):
        return
    if len(some) < len(batch.rows):
        batch, near, seconds = batch.take(some), near[:, some], seconds[:, some]
    count_candidates((WHOLE_SHARE if incumbents.whole else 1) * int(np.count_nonzero(near)))
    if batch.solved is not None:
        rows = fewest_amounts(batch, states, near)
        soon = incumbents.in_reach(rows.step_seconds) & incumbents.in_time(rows.step_seconds)
        yield rows.take(soon), int(np.count_nonzero(near)) - len(rows)
        return
    for state, mine, total in zip(states, near, seconds, strict=True):
        rows = batch.priced_with(state, total)
        yield rows if np.all(mine) else rows.take(mine), 0
