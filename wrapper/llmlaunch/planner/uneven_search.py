"""Uneven pipeline stages, solved for each split that can still be among the fastest.

With one chunk per rank, any assignment of layers is possible. With several, all chunks are equal except the first and
the last. Models whose layers differ in their attention have only even stages (`enumerate_uneven`). If the layers of one
kind differ, the kind counts with their mean.

A step takes at least as long as with perfectly balanced stages. If even that is slower than layouts that are already
safe, the split is outpaced and its stages are not evaluated. The first candidates of the ranking are therefore exact,
and most splits cost one comparison. In a large space without any safe layout, a few techniques represent all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn
from llmlaunch.frameworks.base import StepTechniques
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.grouped_pricing import distinct_states, rank_bytes
from llmlaunch.memory.job import Job, layer_kinds
from llmlaunch.planner.memory_bounds import LeastSeconds, MemoryBounds, by_cost, scouts
from llmlaunch.planner.points import Incumbents, Points, Rows
from llmlaunch.planner.pricing import Offer
from llmlaunch.planner.setting import Setting, count_candidates
from llmlaunch.planner.stage_balance import Costs
from llmlaunch.planner.stage_search import (
    balanced,
    balanced_within,
    costs_of,
    have_cuts,
    most_layers,
)
from llmlaunch.planner.technique_batches import (
    TechniqueBatch,
    alike_steps,
    apply_alike,
    group_equal,
    is_safe,
    state_batch,
    state_batches,
    state_updates,
)
from llmlaunch.progress import report
from llmlaunch.timing.passes import PassSeconds, pass_seconds
from llmlaunch.timing.step import UpdateSeconds

AT_ONCE = 256  # splits evaluated together, fastest bounds first; later ones may be out of reach by then
RANKS_AT_ONCE = 16 * AT_ONCE  # splits evaluated together if nothing is safe and every rank is priced
MANY = 1_000_000  # pipeline ranks times step techniques from which a look ahead pays off
HEAVIER = 9  # weight of a mixture relative to a dense layer
SCOUTS = 9  # step techniques tried first, with those splits
FIRST_PAIRS = 1024  # of splits and techniques, priced first; then many more at a time


@dataclass
class UnevenLayouts:
    """Points of uneven splits, each block over splits of its own, and the number of layouts that were not priced,
    because their model states exceed device memory for every assignment of layers, or because they were outpaced."""

    splits: list[LayoutColumns] = field(default_factory=list)
    blocks: list[Rows] = field(default_factory=list)
    overfull: int = 0
    outpaced: int = 0

    def add(self, splits: LayoutColumns, rows: Rows) -> None:
        """Add rows over splits of their own, one split per row."""
        self.splits.append(splits)
        self.blocks.append(rows.renumbered)


@dataclass(frozen=True)
class Pairs:
    """Splits with step techniques of one group of `alike_steps`; `steps` are their indices. Which `states` are
    `allowed` with each pair, and the lowest `factors` by which the ranking multiplies its seconds, are states x pairs.
    `least_keys` are lower bounds for the place in the ranking. `whole` is true if one rank does not decide that a pair
    is no point."""

    states: Sequence[int]
    splits: LayoutColumns
    steps: IntColumn
    allowed: BoolColumn
    factors: FloatColumn
    whole: BoolColumn
    least_keys: FloatColumn

    def take(self, index: BoolColumn | IntColumn) -> Pairs:
        columns = (self.allowed[:, index], self.factors[:, index], self.whole[index], self.least_keys[index])
        return Pairs(self.states, self.splits.take(index), self.steps[index], *columns)


@dataclass(frozen=True)
class Unsafe:
    """Splits that are not safe in their best balance, each with step techniques, and the state techniques at `state`.
    Another assignment of layers may be safe; the ranking counts at least `least_keys` seconds for it. `costs` are those
    of their stages, and `factors` the lowest by which the ranking multiplies their seconds. `rows` is None if one rank
    was enough to know."""

    state: int
    splits: LayoutColumns
    steps: IntColumn
    costs: Costs
    factors: FloatColumn
    least_keys: FloatColumn
    rows: Rows | None = None

    def take(self, index: IntColumn) -> Unsafe:
        columns = (self.steps[index], self.costs.take(index), self.factors[index], self.least_keys[index])
        rows = None if self.rows is None else self.rows.take(index)
        return Unsafe(self.state, self.splits.take(index), *columns, rows)


def search_uneven(offer: Offer, incumbents: Incumbents) -> UnevenLayouts:
    """Price the uneven splits on offer with all techniques that leave no amount to solve and are within reach of the
    `incumbents`. Safe ones join the incumbents. If the best balance is not safe, the best assignment of layers that
    fits in memory replaces it.

    In a large space, splits that are unsafe even with the few techniques that save most are not priced with the others.
    """
    result, space = UnevenLayouts(), offer.space
    steps = [i for i in by_cost(space) if space.step[i].solved is None]
    bounds, rows = LeastSeconds(offer.setting, space, offer.splits), offer.candidates(steps)
    least, at_once = np.full(len(offer.splits), np.inf), 4 * AT_ONCE
    seconds = bounds.of_any(rows)
    least[rows] = seconds * offer.factors.of_splits()[rows]
    waiting = rows[incumbents.in_time(seconds)]
    waiting = waiting[np.argsort(least[waiting], kind="stable")]
    waiting = waiting[incumbents.in_reach(least[waiting])]
    waiting = waiting[have_cuts(offer.setting.job, offer.splits.take(waiting))]
    if int(offer.splits.pipeline[waiting].sum()) * len(steps) > MANY:
        few = scouts(space, steps if incumbents.any_safe else space.sparing_steps, SCOUTS)
        _look_ahead(offer, bounds, least, waiting, few, incumbents)
        if not incumbents.any_safe and incumbents.safe_alone:
            waiting = waiting[:0]
        elif not incumbents.any_safe:
            roomiest = waiting[np.argsort(offer.least_bytes[:, waiting].min(axis=0), kind="stable")][:AT_ONCE]
            ranks = np.cumsum(offer.splits.pipeline[roomiest])
            roomiest = roomiest[: max(int(np.count_nonzero(ranks <= RANKS_AT_ONCE)), 1)]
            _price_splits(offer, bounds, roomiest, few, incumbents, result, False)
            waiting = waiting[:0]
    first_waiting = len(waiting)
    while len(waiting := waiting[incumbents.in_reach(least[waiting])]):
        report("uneven splits", first_waiting - len(waiting), first_waiting)
        at_once = len(waiting) if len(waiting) < 2 * at_once else at_once  # a few left are not worth another round
        now, waiting, at_once = waiting[:at_once], waiting[at_once:], 4 * at_once
        _price_splits(offer, bounds, now, steps, incumbents, result, incumbents.unsafe_are_lost)
    allowed, overfull = offer.counts(steps)
    result.outpaced = allowed - result.overfull - sum(map(len, result.blocks))
    result.overfull += overfull
    return result


def _look_ahead(
    offer: Offer,
    bounds: LeastSeconds,
    least: FloatColumn,
    waiting: IntColumn,
    steps: Sequence[int],
    incumbents: Incumbents,
) -> None:
    """Find incumbents with a few step techniques: among the fastest splits, or among all splits if those have none."""
    at_once = AT_ONCE
    with incumbents.looking_ahead():
        while len(waiting):
            now, waiting, at_once = waiting[:at_once], waiting[at_once:], 2 * at_once
            _price_splits(offer, bounds, now, steps, incumbents, UnevenLayouts(), True)
            waiting = waiting[incumbents.in_reach(least[waiting])] if incumbents.none else waiting[:0]


def _price_splits(
    offer: Offer,
    bounds: LeastSeconds,
    rows: IntColumn,
    steps: Sequence[int],
    incumbents: Incumbents,
    result: UnevenLayouts,
    brief: bool,
) -> None:
    """Price some splits with some step techniques and all sets of state techniques, the most promising first. Splits
    that are not safe in their best balance get another assignment of layers at the end, when few of them are still
    within reach of the incumbents. If `brief`, splits of which one rank needs too much are not points."""
    pricing, unsafe = Pricing(offer, incumbents, result), []
    groups = list(_pairs_in_reach(offer, bounds, rows, steps, incumbents, result, brief))
    at_once = FIRST_PAIRS
    while groups := [group.take(near) for group in groups if np.any(near := incumbents.in_reach(group.least_keys))]:
        keys = np.sort(np.concatenate([group.least_keys for group in groups]))
        at_once = len(keys) if len(keys) < 16 * at_once else at_once  # a few left are not worth another round
        most, at_once = float(keys[at_once - 1]), 64 * at_once
        for group in sorted(groups, key=lambda group: float(group.least_keys.min())):
            unsafe += pricing.price(group.take(group.least_keys <= most))
        groups = [group.take(group.least_keys > most) for group in groups]
    for rest in sorted(unsafe, key=lambda rest: float(rest.least_keys.min(initial=np.inf))):
        lost, some = np.ones(len(rest.least_keys), dtype=np.bool_), np.flatnonzero(incumbents.in_reach(rest.least_keys))
        if len(some):
            lost[some[pricing.add_fitting(rest.take(some))]] = False
        if rest.rows is None:
            result.overfull += int(np.count_nonzero(lost))
        else:
            result.add(rest.splits.take(lost), rest.rows.take(lost))


def _pairs_in_reach(
    offer: Offer,
    bounds: LeastSeconds,
    rows: IntColumn,
    steps: Sequence[int],
    incumbents: Incumbents,
    result: UnevenLayouts,
    brief: bool,
) -> Iterator[Pairs]:
    """Yield the splits with the step techniques that are legal, within reach by lower bounds, and, if `brief`, may fit
    in memory. The cheapest bounds come first."""
    setting, space, splits = offer.setting, offer.space, offer.splits.take(rows)
    whole = _rehearsed(setting, splits) if brief else np.ones(len(rows), dtype=np.bool_)
    seconds_keeping: dict[StepTechniques, FloatColumn] = {}  # whatever the state techniques are
    for states in group_equal(setting, space):
        memory = MemoryBounds(setting, space, splits, states) if brief else None
        for alike in alike_steps(space, steps):
            keeping_all = space.step[int(alike[0])].keeping_all
            if keeping_all not in seconds_keeping:
                seconds_keeping[keeping_all] = bounds.keeping(keeping_all, rows)
            keeping = seconds_keeping[keeping_all]
            few = np.flatnonzero(incumbents.in_reach(keeping * offer.factors.of_steps(rows, alike).min(axis=0)))
            allowed, factors = offer.allowed_with(alike, states, rows[few]), offer.factors.of_steps(rows[few], alike)
            near = allowed.any(axis=0) & incumbents.in_reach(keeping[few] * factors) & incumbents.in_time(keeping[few])
            if memory is not None and np.any(near):
                fits = memory.may_fit(alike, few) | whole[few]
                result.overfull += int(np.count_nonzero(allowed & near & ~fits))
                near &= fits
            step, place = np.nonzero(near)
            row = few[place]
            seconds = bounds.with_steps(space, alike[step], states[0], rows[row])
            each = np.array([offer.factors.of(rows[row], alike[step], state) for state in states])
            legal = allowed[:, step, place]
            keys = np.where(legal, seconds * each, np.inf).min(axis=0)
            some = np.flatnonzero(incumbents.in_reach(keys) & incumbents.in_time(seconds))
            columns = (legal[:, some], each[:, some], whole[row[some]], keys[some])
            yield Pairs(states, splits.take(row[some]), alike[step[some]], *columns)


def _rehearsed(setting: Setting, splits: LayoutColumns) -> BoolColumn:
    """Return whether each split may be that of a rehearsal, which may overrule an estimate's refusal."""
    rehearsed = np.zeros(len(splits), dtype=np.bool_)
    for rehearsal in setting.lessons.rehearsals:
        sizes = rehearsal.layout.tensor, rehearsal.layout.pipeline, rehearsal.layout.virtual_pipeline
        rehearsed |= (splits.tensor == sizes[0]) & (splits.pipeline == sizes[1]) & (splits.virtual_pipeline == sizes[2])
    return rehearsed


@dataclass(frozen=True)
class Pricing:
    """The pricing of uneven splits on offer: points go to the `result`, and safe ones also to the `incumbents`."""

    offer: Offer
    incumbents: Incumbents
    result: UnevenLayouts

    def price(self, pairs: Pairs) -> list[Unsafe]:
        """Price the pairs in their best balance, and return those that may be safe with another assignment of layers.
        Time comes first, because it is cheaper than the memory of all ranks. So is the memory of one rank, which comes
        next unless the pairs must be whole."""
        setting = self.offer.setting
        count_candidates(len(pairs.steps))
        # other groups may have added incumbents since
        pairs = pairs.take(self.incumbents.in_reach(pairs.least_keys))
        if not len(pairs.steps):
            return []
        job, layouts = self._applied(pairs.splits, pairs.steps, pairs.states[0])
        costs = costs_of(job, setting.cluster, layouts)
        cut = balanced(job, layouts, costs)
        uneven = np.flatnonzero(cut.uneven)  # even cuts are searched with the even splits
        passes = pass_seconds(job, setting.cluster, cut.take(uneven))
        in_reach = self.incumbents.in_reach(passes.total * pairs.factors[:, uneven].min(axis=0))
        soon = np.flatnonzero(in_reach & self.incumbents.in_time(passes.total))
        uneven = uneven[soon]
        if not len(uneven):
            return []
        return list(self._price_cuts(cut.take(uneven), passes.take(soon), pairs.take(uneven), costs.take(uneven)))

    def _applied(self, splits: LayoutColumns, steps: IntColumn, state: int) -> tuple[Job, LayoutColumns]:
        """Return the job for similar step techniques, and the layouts with them and a set of state techniques."""
        return apply_alike(self.offer.setting, self.offer.space, steps, state, splits)

    def _price_cuts(self, splits: LayoutColumns, passes: PassSeconds, pairs: Pairs, costs: Costs) -> Iterator[Unsafe]:
        """Add the pairs, with their `splits` assigned to stages, that are safe. Yield those that may be safe with
        another assignment."""
        setting, space = self.offer.setting, self.offer.space
        single = splits.virtual_pipeline == 1
        batch, distinct = self._technique_batch(splits, pairs.steps, pairs.states[0])
        batch = replace(batch, timed=passes)
        updates = state_updates(setting, space, pairs.states, distinct)
        seconds = batch.step_seconds(UpdateSeconds.stacked(updates))
        keys = seconds * pairs.factors
        # several chunks allow few assignments, of which this one is the fastest
        near = pairs.allowed & (single | self.incumbents.in_reach(keys))
        full = near & ~pairs.whole
        if np.any(full):
            full &= self._one_is_full(splits, pairs, full)
        for place, index in enumerate(pairs.states):
            factors = pairs.factors[place]
            unsafe = Unsafe(index, splits, pairs.steps, costs, factors, passes.total * factors)
            yield unsafe.take(np.flatnonzero(full[place] & single))
            self.result.overfull += int(np.count_nonzero(full[place] & ~single))
            some = np.flatnonzero(near[place] & ~full[place] & self.incumbents.in_reach(keys[place]))
            if len(some):
                cut, states = splits.take(some), state_batch(setting, space, index, distinct, updates[place])
                rows = batch.take(some).priced_with(states, seconds[place, some])
                again = ~is_safe(setting, rows.device_bytes, rows.host_bytes) & single[some]
                self._add(cut.take(~again), rows.take(~again))
                yield replace(unsafe.take(some), least_keys=keys[place, some], rows=rows).take(np.flatnonzero(again))

    def _one_is_full(self, splits: LayoutColumns, pairs: Pairs, asked: BoolColumn) -> BoolColumn:
        """Return whether one rank of each split needs too much memory with each of the state techniques (states x
        splits), where `asked`. It is the rank with the largest product of layers and micro-batches kept. The fullest
        rank of the split needs no less."""
        rank = _heaviest_rank(splits, layer_kinds(self.offer.setting.recipe.model))
        full = np.zeros(asked.shape, dtype=np.bool_)
        some, of_states = np.flatnonzero(np.any(asked, axis=0)), np.flatnonzero(np.any(asked, axis=1))
        states = [pairs.states[place] for place in of_states.tolist()]
        applied = [self._applied(splits.take(some), pairs.steps[some], index) for index in states]
        bytes_ = rank_bytes([job for job, _ in applied], [layouts for _, layouts in applied], rank[some])
        full[np.ix_(of_states, some)] = np.array(bytes_) > self.offer.setting.limit.most_bytes
        return full

    def _add(self, splits: LayoutColumns, rows: Rows) -> None:
        """Add rows over splits of their own, one split per row."""
        self.result.add(splits, rows)
        safe = is_safe(self.offer.setting, rows.device_bytes, rows.host_bytes)
        space = self.offer.space
        self.incumbents.add(Points(splits, space.step, space.state, self.result.blocks[-1].take(safe)))

    def add_fitting(self, unsafe: Unsafe) -> IntColumn:
        """Add the best assignment of layers that fits in memory for each split. Return the row numbers of the splits
        that have one within reach."""
        setting, space = self.offer.setting, self.offer.space
        job, layouts = self._applied(unsafe.splits, unsafe.steps, unsafe.state)
        most_seconds = np.minimum(self.incumbents.key_to_beat / unsafe.factors, self.incumbents.reach.most_seconds)
        most = most_layers(job, layouts, unsafe.costs, most_seconds)
        count_candidates(len(layouts))
        fitting, cut = balanced_within(job, layouts, unsafe.costs, setting.limit.limit_bytes, most)
        if len(fitting):
            batch, distinct = self._technique_batch(cut, unsafe.steps[fitting], unsafe.state)
            (states,) = state_batches(setting, space, [unsafe.state], distinct)
            self._add(cut, batch.priced_with(states))
        return fitting

    def _technique_batch(
        self, splits: LayoutColumns, steps: IntColumn, state: int
    ) -> tuple[TechniqueBatch, LayoutColumns]:
        """Return the splits with the step techniques, and the few that differ in their model states."""
        job, layouts = self._applied(splits, steps, state)
        distinct, state_of = distinct_states(job, layouts)
        return TechniqueBatch(self.offer.setting, job, steps, np.arange(len(layouts)), layouts, state_of), distinct


def _heaviest_rank(splits: LayoutColumns, kinds: Sequence[int]) -> IntColumn:
    """Return the rank of each split whose layers, mixtures above all, weigh most, given that early ranks keep most
    micro-batches. It is a guess; any rank gives a bound."""
    mixtures = np.concatenate([[0], np.cumsum(np.asarray(kinds) * HEAVIER + 1)])
    rank = np.zeros(len(splits), dtype=np.int64)
    for partition, pipeline in sorted(set(zip(splits.partition.tolist(), splits.pipeline.tolist(), strict=True))):
        ends = np.concatenate([[0], np.cumsum(splits.partitions[partition])])
        weight = np.diff(mixtures[ends]).reshape(-1, pipeline).sum(axis=0)
        heaviest = int(np.argmax(weight * (2 * pipeline - np.arange(pipeline))))
        rank[(splits.partition == partition) & (splits.pipeline == pipeline)] = heaviest
    return rank
