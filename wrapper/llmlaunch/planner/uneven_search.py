"""Uneven pipeline stages, solved for each split that can still be among the fastest.

A step takes at least as long as with stages in perfect balance. If even that is longer than layouts that are safe
already, the split is outpaced and its stages are not evaluated. So the first of the ranking are exact, and most splits
cost one comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.grouped_pricing import distinct_states, rank_bytes
from llmlaunch.memory.job import layer_kinds
from llmlaunch.planner.bounds import StepBounds, by_cost, least_seconds, scouts
from llmlaunch.planner.incumbents import Incumbents
from llmlaunch.planner.points import Points, Rows
from llmlaunch.planner.pricing import (
    Offer,
    TechniqueBatch,
    group_equal,
    is_safe,
    state_batch,
    state_update,
)
from llmlaunch.planner.search_space import apply_techniques
from llmlaunch.planner.setting import Setting
from llmlaunch.planner.stage_search import balanced, balanced_within, costs_of
from llmlaunch.timing.passes import PassSeconds, pass_seconds

__all__ = ["UnevenLayouts", "search_uneven"]

AT_ONCE = 256  # splits evaluated together, the fastest bounds first; the next ones may be out of reach by then
MANY = 50_000  # splits times step techniques that are worth a look ahead
HEAVIER = 9  # how much more than a dense layer a mixture weighs
SCOUTS = 9  # step techniques tried first, with those splits


@dataclass
class UnevenLayouts:
    """Points of uneven splits, each block over splits of its own, and how many layouts were not priced: their model
    states exceed device memory for every cut of the layers, or they were outpaced."""

    splits: list[LayoutColumns] = field(default_factory=list)
    blocks: list[Rows] = field(default_factory=list)
    overfull: int = 0
    outpaced: int = 0

    def add(self, splits: LayoutColumns, rows: Rows) -> None:
        """Add rows over splits of their own, one each."""
        self.splits.append(splits)
        self.blocks.append(rows.renumbered)


@dataclass(frozen=True)
class Unsafe:
    """Splits in their best balance that are not safe, with the state techniques at `state`: another cut may be, which
    the ranking counts `least_keys` seconds at least. `rows` are None where one rank was enough to know."""

    batch: Batch
    state: int
    splits: LayoutColumns
    least_keys: FloatColumn
    rows: Rows | None = None


def search_uneven(offer: Offer, incumbents: Incumbents) -> UnevenLayouts:
    """Price the uneven splits on offer with all techniques that leave no amount to solve and are within reach of the
    `incumbents`, which the safe ones join. If the best balance is not safe, the best that memory allows replaces it.

    In a large space, what a few techniques that spare most leave unsafe everywhere is not priced with the others.
    """
    result, space = UnevenLayouts(), offer.space
    steps = [i for i in by_cost(space) if space.step[i].solved is None]
    least = least_seconds(offer.setting, space, offer.splits) * offer.factors.of_splits()
    waiting, at_once = offer.in_order(least, steps), 4 * AT_ONCE
    waiting = waiting[incumbents.in_reach(least[waiting])]
    if len(waiting) * len(steps) > MANY:
        _look_ahead(offer, least, waiting, incumbents)
        if incumbents.none:
            roomiest = np.argsort(offer.least_bytes[:, waiting].min(axis=0), kind="stable")[:AT_ONCE]
            _price_splits(offer, waiting[roomiest], scouts(space, SCOUTS), incumbents, result, False)
            waiting = waiting[:0]
    while len(waiting := waiting[incumbents.in_reach(least[waiting])]):
        at_once = len(waiting) if len(waiting) < 2 * at_once else at_once  # a few left are not worth another round
        now, waiting, at_once = waiting[:at_once], waiting[at_once:], 4 * at_once
        _price_splits(offer, now, steps, incumbents, result, not incumbents.none)
    allowed, overfull = offer.counts(steps)
    result.outpaced = allowed - result.overfull - sum(map(len, result.blocks))
    result.overfull += overfull
    return result


def _look_ahead(offer: Offer, least: FloatColumn, waiting: IntColumn, incumbents: Incumbents) -> None:
    """Find incumbents with a few step techniques: among the fastest splits, or among all where those have none."""
    at_once = AT_ONCE
    with incumbents.looking_ahead():
        while len(waiting):
            now, waiting, at_once = waiting[:at_once], waiting[at_once:], 2 * at_once
            _price_splits(offer, now, scouts(offer.space, SCOUTS), incumbents, UnevenLayouts(), True)
            waiting = waiting[incumbents.in_reach(least[waiting])] if incumbents.none else waiting[:0]


def _price_splits(
    offer: Offer, rows: IntColumn, steps: Sequence[int], incumbents: Incumbents, result: UnevenLayouts, brief: bool
) -> None:
    """Price some splits with some step techniques and all sets of state techniques. What is not safe in its best
    balance is cut anew at the end: by then the incumbents leave few of it within reach. If `brief`, splits of which one
    rank needs too much are no points."""
    setting, space, splits = offer.setting, offer.space, offer.splits.take(rows)
    bounds = StepBounds(setting, space, splits, in_balance=True)
    whole = _rehearsed(setting, splits) if brief else np.ones(len(rows), dtype=np.bool_)
    unsafe: list[Unsafe] = []
    for indices in group_equal(setting, space):
        for i in steps:
            allowed, least = offer.allowed(i, indices, rows), bounds.least(space.step[i])
            some = np.flatnonzero(allowed.any(axis=0) & incumbents.in_reach(least * offer.factors.of(rows, i)))
            if len(some):
                factors = np.array([offer.factors.of(rows[some], i, index) for index in indices])
                batch = Batch(offer, incumbents, result, i, indices)
                seconds, more = batch.price(splits.take(some), allowed[:, some], factors, whole[some])
                bounds.add(space.step[i], some, seconds, least)
                unsafe += more
    for rest in sorted(unsafe, key=lambda rest: float(rest.least_keys.min(initial=np.inf))):
        near = np.flatnonzero(incumbents.in_reach(rest.least_keys))
        lost = np.ones(len(rest.least_keys), dtype=np.bool_)
        if len(near):
            lost[near[rest.batch.add_fitting(rest.splits.take(near), rest.state)]] = False
        if rest.rows is None:
            result.overfull += int(np.count_nonzero(lost))
        else:
            result.add(rest.splits.take(lost), rest.rows.take(lost))


def _rehearsed(setting: Setting, splits: LayoutColumns) -> BoolColumn:
    """Whether each split may be one of a rehearsal, which may lift what an estimate refuses."""
    rehearsed = np.zeros(len(splits), dtype=np.bool_)
    for rehearsal in setting.lessons.rehearsals:
        sizes = rehearsal.layout.tensor, rehearsal.layout.pipeline, rehearsal.layout.virtual_pipeline
        rehearsed |= (splits.tensor == sizes[0]) & (splits.pipeline == sizes[1]) & (splits.virtual_pipeline == sizes[2])
    return rehearsed


@dataclass(frozen=True)
class Batch:
    """The pricing of uneven splits with one set of step techniques, and with several of state techniques that share
    their facts."""

    offer: Offer
    incumbents: Incumbents
    result: UnevenLayouts
    step: int
    states: Sequence[int]

    def price(
        self, splits: LayoutColumns, allowed: BoolColumn, factors: FloatColumn, whole: BoolColumn
    ) -> tuple[FloatColumn, list[Unsafe]]:
        """Price the splits in their best balance, for each of the state techniques that are `allowed` (state techniques
        x splits), whose `factors` the ranking counts at least. Return the seconds of their passes, 0 where the best
        balance is even, and what may be safe if it is cut otherwise. Time comes first: it costs less than the memory of
        all ranks, and so does that of one rank, where splits need not be priced `whole`."""
        setting, space = self.offer.setting, self.offer.space
        recipe, layouts = apply_techniques(setting.recipe, space, (self.step, self.states[0]), splits)
        job = setting.job_of(recipe)
        cut = balanced(job, layouts, costs_of(job, setting.cluster, layouts))
        uneven = np.flatnonzero(cut.uneven)  # even cuts are searched with the even splits
        passes = pass_seconds(job, setting.cluster, cut.take(uneven))
        least = np.zeros(len(splits))
        least[uneven] = passes.total
        soon = self.incumbents.in_reach(passes.total * factors[:, uneven].min(axis=0))
        if not np.any(soon):
            return least, []
        uneven = uneven[soon]
        return least, list(
            self._price_cuts(cut.take(uneven), passes.take(soon), allowed[:, uneven], factors[:, uneven], whole[uneven])
        )

    def _price_cuts(
        self,
        splits: LayoutColumns,
        passes: PassSeconds,
        allowed: BoolColumn,
        factors: FloatColumn,
        whole: BoolColumn,
    ) -> Iterator[Unsafe]:
        """Add the splits that are safe; yield those that may be if they are cut otherwise."""
        setting, space = self.offer.setting, self.offer.space
        batch, distinct = self._technique_batch(splits, self.states[0])
        batch = batch.with_passes(passes)
        updates = [state_update(setting, space, index, distinct) for index in self.states]
        seconds = np.array([batch.step_seconds(update) for update in updates])
        keys = seconds * factors
        near = allowed & self.incumbents.in_reach(keys)
        full = near & ~whole
        if np.any(full):
            full &= self._bytes_of_a_rank(splits) > setting.limit.most_bytes
        single = splits.virtual_pipeline == 1
        for place, index in enumerate(self.states):
            some = np.flatnonzero(near[place] & ~full[place])
            if len(some):
                cut, states = splits.take(some), state_batch(setting, space, index, distinct)
                rows = batch.take(some).priced_with(states, seconds[place, some])
                again = ~is_safe(setting, rows.device_bytes, rows.host_bytes) & single[some]
                self._add(cut.take(~again), rows.take(~again))
                yield Unsafe(self, index, cut.take(again), keys[place, some[again]], rows.take(again))
            self.result.overfull += int(np.count_nonzero(full[place] & ~single))
            again = full[place] & single
            yield Unsafe(self, index, splits.take(again), keys[place, again])

    def _bytes_of_a_rank(self, splits: LayoutColumns) -> FloatColumn:
        """Return the bytes of one rank of each split, with each of the state techniques (states x splits): the rank
        with the most layers times the micro-batches it keeps. The fullest rank of the split needs no less."""
        setting, space = self.offer.setting, self.offer.space
        applied = [apply_techniques(setting.recipe, space, (self.step, index), splits) for index in self.states]
        jobs = [setting.job_of(recipe) for recipe, _ in applied]
        rank = _heaviest_rank(splits, layer_kinds(jobs[0].shape))
        return np.array(rank_bytes(jobs, [layouts for _, layouts in applied], rank))

    def _add(self, splits: LayoutColumns, rows: Rows) -> None:
        """Add rows over splits of their own, one each."""
        self.result.add(splits, rows)
        safe = is_safe(self.offer.setting, rows.device_bytes, rows.host_bytes)
        space = self.offer.space
        self.incumbents.add(Points(splits, space.step, space.state, self.result.blocks[-1].take(safe)))

    def add_fitting(self, splits: LayoutColumns, state: int) -> IntColumn:
        """Add the best cut that memory allows of each split; return the row numbers of those that have one."""
        setting, space = self.offer.setting, self.offer.space
        recipe, layouts = apply_techniques(setting.recipe, space, (self.step, state), splits)
        job = setting.job_of(recipe)
        costs = costs_of(job, setting.cluster, layouts)
        slowest = self.incumbents.key_to_beat / np.maximum(layouts.num_microbatches(job.workload.global_batch_size), 1)
        fitting, cut = balanced_within(job, layouts, costs, setting.limit.limit_bytes, slowest)
        if len(fitting):
            batch, distinct = self._technique_batch(cut, state)
            self._add(cut, batch.priced_with(state_batch(setting, space, state, distinct)))
        return fitting

    def _technique_batch(self, splits: LayoutColumns, state: int) -> tuple[TechniqueBatch, LayoutColumns]:
        """Return the splits with the step techniques, and the few that differ in their model states."""
        setting = self.offer.setting
        recipe, layouts = apply_techniques(setting.recipe, self.offer.space, (self.step, state), splits)
        job = setting.job_of(recipe)
        distinct, state_of = distinct_states(job, layouts)
        return TechniqueBatch(setting, job, self.step, np.arange(len(layouts)), layouts, state_of), distinct


def _heaviest_rank(splits: LayoutColumns, kinds: Sequence[int]) -> IntColumn:
    """Return the rank of each split whose layers, mixtures before all, weigh most where early ranks keep most
    micro-batches: a guess, and any rank is a bound."""
    mixtures = np.concatenate([[0], np.cumsum(np.asarray(kinds) * HEAVIER + 1)])
    rank = np.zeros(len(splits), dtype=np.int64)
    for partition, pipeline in sorted(set(zip(splits.partition.tolist(), splits.pipeline.tolist(), strict=True))):
        ends = np.concatenate([[0], np.cumsum(splits.partitions[partition])])
        weight = np.diff(mixtures[ends]).reshape(-1, pipeline).sum(axis=0)
        heaviest = int(np.argmax(weight * (2 * pipeline - np.arange(pipeline))))
        rank[(splits.partition == partition) & (splits.pipeline == pipeline)] = heaviest
    return rank
