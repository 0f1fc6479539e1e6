"""Bytes and seconds of every legal split with every combination of techniques, solved amounts included.

Activations and passes are priced once for each set of step techniques. Model states and the optimizer step are priced
once for each set of state techniques and the few splits that differ in them. A candidate is the sum of the two parts
(memory/grouped_pricing.py, timing/step.py).

Some amounts are solved exactly for each split: recomputed and offloaded layers. Every further layer needs no more
memory and takes no less time, so the fewest that are safe are the fastest, and bisection finds them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn, NarrowColumn
from llmlaunch.frozen import frozen
from llmlaunch.layout import RECOMPUTE_NONE, LayoutColumns, Rule
from llmlaunch.memory.grouped_pricing import (
    ModelStateBytes,
    RankPiece,
    TransientBytes,
    WorstBytes,
    distinct_states,
    model_state_bytes,
    rank_pieces,
    transient_bytes,
    worst_of_sums,
)
from llmlaunch.memory.job import Job
from llmlaunch.models.shape import ModelShape
from llmlaunch.planner.bounds import LeastFactors, StepBounds, by_cost, least_seconds, scouts, switch_sets
from llmlaunch.planner.incumbents import Incumbents
from llmlaunch.planner.legality import TechniqueLegality, technique_legality
from llmlaunch.planner.points import NO_ROWS, GatheredRows, Points, Rows, join_rows
from llmlaunch.planner.search_space import TechniqueSpace, apply_techniques, recipe_with_techniques
from llmlaunch.planner.setting import Setting, node_of
from llmlaunch.timing.passes import PassSeconds, pass_seconds
from llmlaunch.timing.step import UpdateSeconds, combined, update_seconds

__all__ = [
    "Offer",
    "Priced",
    "TechniqueBatch",
    "filled_share",
    "group_equal",
    "is_safe",
    "price",
    "price_all",
    "price_rows",
    "roomiest",
    "state_batch",
    "state_job",
    "state_update",
]

AT_ONCE = 1024  # splits priced first; four times as many each time that nothing puts the others out of reach
WHOLE_AT_ONCE = 6144  # splits priced together where all are: their columns stay in the processor's cache
ROOMIEST = 64  # splits priced first where nothing is safe
SCOUTS = 12  # step techniques tried first, with those splits
SCOUTED = 200_000  # splits times step techniques that are worth a look ahead


@frozen
class ModelStateBatch:
    """Sets of state techniques, at `index` of the technique space, over the few splits that differ in their model
    states: all splits with one set, then all with the next."""

    index: NarrowColumn
    states: ModelStateBytes
    update: UpdateSeconds

    @classmethod
    def joined(cls, batches: Sequence[ModelStateBatch]) -> ModelStateBatch:
        """Return one after the other; their facts are equal."""
        return cls(
            np.concatenate([batch.index for batch in batches]),
            ModelStateBytes.joined([batch.states for batch in batches]),
            UpdateSeconds.joined([batch.update for batch in batches]),
        )


@frozen
class TechniqueBatch:
    """One set of step techniques, at `index` of the technique space, over `rows` of the splits. `state_of` maps each
    row to its split of a `ModelStateBatch`; `solved` names the amount to be solved, and `none_searched` says whether
    layouts with none of it are searched too. `ranks` are the candidate ranks of the same splits with any techniques,
    where several batches share them."""

    setting: Setting
    job: Job
    index: int
    rows: IntColumn
    layouts: LayoutColumns
    state_of: IntColumn
    solved: str | None = None
    none_searched: bool = True
    ranks: Sequence[RankPiece] | None = None

    @cached_property
    def transient(self) -> TransientBytes:
        return transient_bytes(self.job, self.layouts, node_of(self.setting.recipe), self.ranks)

    @cached_property
    def passes(self) -> PassSeconds:
        return pass_seconds(self.job, self.setting.cluster, self.layouts)

    @cached_property
    def with_none(self) -> TechniqueBatch:
        """The same candidates with the solved amount set to zero."""
        if self.solved == "recompute_layers":
            return replace(
                self, layouts=self.layouts.with_techniques(0, RECOMPUTE_NONE, 0, self.layouts.offload_layers)
            )
        return self.with_amount(np.zeros(len(self.layouts), dtype=np.int64))

    @cached_property
    def with_all(self) -> TechniqueBatch:
        """The same candidates with the largest possible amount."""
        assert self.solved is not None
        return self.with_amount(largest_amount(self.job.shape, self.layouts, self.solved))

    def with_amount(self, amount: IntColumn) -> TechniqueBatch:
        assert self.solved is not None
        return replace(self, layouts=self.layouts.with_amount(self.solved, amount))

    def take(self, index: BoolColumn | IntColumn) -> TechniqueBatch:
        """Return some of the rows, with their passes where these are known already."""
        layouts, state_of = self.layouts.take(index), self.state_of[index]
        some = replace(self, rows=self.rows[index], layouts=layouts, state_of=state_of, ranks=None)
        return some.with_passes(self.passes.take(index)) if "passes" in vars(self) else some

    def with_passes(self, passes: PassSeconds) -> TechniqueBatch:
        """Return the same batch, whose passes are known already."""
        same = replace(self)
        vars(same)["passes"] = passes
        return same

    def bytes_with(self, states: ModelStateBatch) -> WorstBytes:
        return worst_of_sums(self.transient, states.states, self.state_of)

    def safe_with(self, states: ModelStateBatch) -> BoolColumn:
        """Whether each candidate fits devices and nodes."""
        worst = self.bytes_with(states)
        return is_safe(self.setting, worst.device_bytes, worst.host_bytes)

    def step_seconds(self, update: UpdateSeconds) -> FloatColumn:
        """Return the seconds of one training step for each candidate. `update` holds the optimizer-step seconds of the
        splits that share model states."""
        return combined(self.passes, update.take(self.state_of)).total

    def priced_with(self, states: ModelStateBatch, seconds: FloatColumn | None = None) -> Rows:
        """Return bytes and seconds of each candidate; `seconds` are those of a step where they were computed before."""
        worst = self.bytes_with(states)
        return Rows(
            split=self.rows.astype(np.int32),
            step_techniques=np.full(len(self.rows), self.index, dtype=np.int32),
            state_techniques=states.index[self.state_of],
            recompute_layers=self.layouts.recompute_layers.astype(np.int32),
            offload_layers=self.layouts.offload_layers.astype(np.int32),
            device_bytes=worst.device_bytes,
            worst_pipeline_rank=worst.pipeline_rank.astype(np.int32),
            host_bytes=worst.host_bytes,
            step_seconds=self.step_seconds(states.update) if seconds is None else seconds,
        )


@frozen
class TakenSplits:
    """Those at `some` of a search's splits that are priced together, with what all techniques share: their `rows` among
    all splits, the splits of a `ModelStateBatch` that they have the states of, and their candidate ranks, which are the
    same whatever the techniques."""

    some: IntColumn
    rows: IntColumn
    layouts: LayoutColumns
    state_of: IntColumn
    ranks: Sequence[RankPiece]

    @classmethod
    def of(
        cls, setting: Setting, splits: LayoutColumns, some: IntColumn, rows: IntColumn, state_of: IntColumn
    ) -> TakenSplits:
        layouts = splits.take(some)
        return cls(some, rows[some], layouts, state_of[some], rank_pieces(setting.job, layouts))


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

    def in_order(self, least: FloatColumn, steps: Sequence[int]) -> IntColumn:
        """Return the splits that may be priced with anything, those with the least seconds first."""
        used = set(self.legality.mask_of[list(steps)].flat)
        legal = np.any([self.legality.masks[index] for index in used], axis=0)
        rows = np.flatnonzero(legal & self.fits.any(axis=0))
        order: IntColumn = rows[np.argsort(least[rows], kind="stable")]
        return order


def price_all(setting: Setting, splits: LayoutColumns, space: TechniqueSpace, rules: Sequence[Rule]) -> Points:
    """Return the points of all `splits` with all techniques that the `rules`, which look at them, allow."""
    steps = range(len(space.step))
    legality = technique_legality(setting.recipe, space, splits, rules, steps)
    offer = Offer(setting, splits, space, legality, np.zeros((len(space.state), len(splits))))
    return Points(splits, space.step, space.state, price_rows(offer, np.arange(len(splits)), steps))


def price(offer: Offer, incumbents: Incumbents) -> Priced:
    """Price the candidates that are within reach of the `incumbents`, which the safe ones join.

    The splits with the least seconds come first, a few techniques before all of them, so that good incumbents leave
    most of the others out of reach before anything of theirs is priced.
    """
    space, steps = offer.space, by_cost(offer.space)
    allowed, overfull = offer.counts(steps)
    if incumbents.whole:
        offer = replace(offer, least_bytes=np.zeros_like(offer.least_bytes))
        rows, spare, sets = GatheredRows(allowed + overfull), 0, switch_sets(space)
        in_turn = sorted(steps, key=lambda i: sets.index(space.step[i].keeping_all))  # each set's share most columns
        for start in range(0, len(offer.splits), WHOLE_AT_ONCE):
            now = np.arange(start, min(start + WHOLE_AT_ONCE, len(offer.splits)))
            spare += _price_rows(offer, now, in_turn, incumbents, rows)
        return Priced(rows, 0, allowed + overfull - spare - len(rows))
    rows, spare, at_once = GatheredRows(), 0, AT_ONCE
    least = least_seconds(offer.setting, space, offer.splits) * offer.factors.of_splits()
    waiting = offer.in_order(least, steps)
    if len(steps) * len(waiting) > SCOUTED:
        with incumbents.looking_ahead():
            _price_rows(offer, waiting[:AT_ONCE], scouts(space, SCOUTS), incumbents, GatheredRows())
    while len(waiting := waiting[incumbents.in_reach(least[waiting])]):
        now, waiting = waiting[:at_once], waiting[at_once:]
        spare, at_once = spare + _price_rows(offer, now, steps, incumbents, rows), 4 * at_once
    return Priced(rows, overfull, allowed - spare - len(rows))


def roomiest(offer: Offer, exact: int) -> GatheredRows:
    """Return points of which the `exact` first fill memory least of all candidates, for a search in which nothing is
    safe. Splits whose model states alone need more than those are not priced. In a large space a few techniques that
    spare most say which of the splits with the least model states are roomiest, and these are priced with all."""
    space, found = offer.space, GatheredRows()
    offered = replace(offer, least_bytes=np.zeros_like(offer.least_bytes))
    least = offer.least_bytes.min(axis=0, initial=np.inf) / max(offer.setting.limit.limit_bytes, 1)
    rows, steps = offered.in_order(least, range(len(space.step))), range(len(space.step))
    if len(rows) * len(steps) <= SCOUTED:
        found.add(_roomiest_of(offered, rows, least, steps, exact))
    else:
        ahead = _roomiest_of(offered, rows[: 5 * ROOMIEST], least, scouts(space, SCOUTS), exact)
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
) -> int:
    """Add to `priced` some splits with some techniques. Return how many layouts with a solved amount are the same as
    those without."""
    setting, space, splits = offer.setting, offer.space, offer.splits.take(rows)
    spare = 0
    distinct, state_of = distinct_states(setting.job, splits)
    bounds = StepBounds(setting, space, splits)
    taken: dict[bytes, TakenSplits] = {}  # many techniques are legal with the same splits
    for indices in group_equal(setting, space):
        states = [state_batch(setting, space, index, distinct) for index in indices]
        for i in steps:
            allowed = offer.allowed(i, indices, rows)
            near = np.asarray(allowed.any(axis=0))
            least = np.zeros(0)
            if not incumbents.whole:
                least = bounds.least(space.step[i])
                near &= incumbents.in_reach(least * offer.factors.of(rows, i))
            if not np.any(near):
                continue
            if near.tobytes() not in taken:
                taken[near.tobytes()] = TakenSplits.of(setting, splits, np.flatnonzero(near), rows, state_of)
            mine = taken[near.tobytes()]
            some, batch = mine.some, _technique_batch(setting, space, (i, indices[0]), mine)
            allowed, factors = allowed[:, some], np.ones((len(indices), 1))
            if not incumbents.whole:
                bounds.add(space.step[i], some, batch.passes.total, least)
                factors = np.array([offer.factors.of(rows[some], i, index) for index in indices])
            for block, unneeded in _blocks(batch, states, allowed, factors, incumbents):
                safe = block.take(is_safe(setting, block.device_bytes, block.host_bytes))
                incumbents.add(Points(offer.splits, space.step, space.state, safe))
                priced.add(block)
                spare += unneeded
    return spare


def _blocks(
    batch: TechniqueBatch,
    states: Sequence[ModelStateBatch],
    allowed: BoolColumn,
    factors: FloatColumn,
    incumbents: Incumbents,
) -> Iterator[tuple[Rows, int]]:
    """Yield for each of the `states` the rows of a batch that are allowed with it (states x rows) and within reach by
    their seconds times their `factors`, and how many layouts with a solved amount need none of it. Time comes first: it
    costs less than memory, and leaves few."""
    seconds = np.array([batch.step_seconds(state.update) for state in states])
    near = allowed & incumbents.in_reach(seconds * factors)
    some = np.flatnonzero(near.any(axis=0))
    if not len(some):
        return
    if len(some) < len(batch.rows):
        batch, near, seconds = batch.take(some), near[:, some], seconds[:, some]
    if batch.solved is not None:
        rows = _fewest_safe(batch, states, near)
        yield rows.take(incumbents.in_reach(rows.step_seconds)), int(np.count_nonzero(near)) - len(rows)
        return
    for state, mine, total in zip(states, near, seconds, strict=True):
        rows = batch.priced_with(state, total)
        yield rows if np.all(mine) else rows.take(mine), 0


def group_equal(setting: Setting, space: TechniqueSpace) -> list[list[int]]:
    """Group the indices of state techniques whose facts are equal: what the step adds is priced once for a group."""
    groups: dict[object, list[int]] = {}
    for index in range(len(space.state)):
        groups.setdefault(state_job(setting, space, index).facts, []).append(index)
    return list(groups.values())


def state_job(setting: Setting, space: TechniqueSpace, index: int) -> Job:
    """Return the job with the state techniques at `index`."""
    return setting.job_of(recipe_with_techniques(setting.recipe, space.step[0], space.state[index]))


def state_batch(setting: Setting, space: TechniqueSpace, index: int, distinct: LayoutColumns) -> ModelStateBatch:
    job = state_job(setting, space, index)
    layouts = distinct.with_techniques(space.state[index].zero_stage, 0, 0, 0)
    states = model_state_bytes(job, layouts, node_of(setting.recipe))
    places = np.full(len(layouts), index, dtype=np.int32)
    return ModelStateBatch(places, states, update_seconds(job, setting.cluster, layouts))


def state_update(setting: Setting, space: TechniqueSpace, index: int, distinct: LayoutColumns) -> UpdateSeconds:
    """Return the update seconds of the state techniques at `index`, without their bytes."""
    layouts = distinct.with_techniques(space.state[index].zero_stage, 0, 0, 0)
    return update_seconds(state_job(setting, space, index), setting.cluster, layouts)


def _technique_batch(
    setting: Setting, space: TechniqueSpace, indices: tuple[int, int], splits: TakenSplits
) -> TechniqueBatch:
    recipe, layouts = apply_techniques(setting.recipe, space, indices, splits.layouts)
    step = space.step[indices[0]]
    none_searched = step.keeping_all in space.step
    job = setting.job_of(recipe)
    return TechniqueBatch(
        setting, job, indices[0], splits.rows, layouts, splits.state_of, step.solved, none_searched, splits.ranks
    )


def _fewest_safe(batch: TechniqueBatch, states: Sequence[ModelStateBatch], allowed: BoolColumn) -> Rows:
    """Return the rows that need some of the amount with each of the `states` they are allowed with (states x rows),
    with the least that is safe, or all of it where nothing is safe. Rows that are safe with none of it are left out
    where those are searched too: they are the same layouts. All states are solved together."""
    needed = allowed
    if batch.none_searched:
        needed = allowed & ~np.array([batch.with_none.safe_with(state) for state in states])
    place, some = np.nonzero(needed)
    enough = np.array([batch.with_all.safe_with(state) for state in states])[needed]
    together = ModelStateBatch.joined(states)
    chosen = batch.take(some)
    chosen = replace(chosen, state_of=chosen.state_of + place * (len(together.index) // len(states)))
    most = largest_amount(batch.job.shape, chosen.layouts, str(batch.solved))

    def safe(rows: IntColumn, amount: IntColumn) -> BoolColumn:
        return chosen.take(rows).with_amount(amount).safe_with(together)

    return chosen.with_amount(fewest_safe(safe, most, enough)).priced_with(together)


def largest_amount(shape: ModelShape, layouts: LayoutColumns, name: str) -> IntColumn:
    """Return the most layers an amount may count: all layers of a model chunk can be recomputed; one layer of a rank
    stays on the device (megatron/core/transformer/transformer_config.py cpu_offloading_num_layers, core 0.19)."""
    even = shape.num_layers // (layouts.pipeline * layouts.virtual_pipeline)
    largest = np.array([max(split, default=0) for split in layouts.partitions])[layouts.partition]
    layers = np.where(layouts.uneven, largest, even)
    most: IntColumn = np.maximum(layers if name == "recompute_layers" else layers - 1, 1)
    return most


def fewest_safe(safe: Callable[[IntColumn, IntColumn], BoolColumn], most: IntColumn, enough: BoolColumn) -> IntColumn:
    """Return the smallest amount in 1 .. `most` of each row for which `safe(rows, amounts)` holds, and `most` in rows
    where even that is not `enough`. What is safe stays safe with more."""
    low: IntColumn = np.ones_like(most)
    high: IntColumn = most.copy()
    rows = np.flatnonzero(enough)
    while len(rows := rows[low[rows] < high[rows]]):
        middle = (low[rows] + high[rows]) // 2
        is_enough = safe(rows, middle)
        high[rows[is_enough]] = middle[is_enough]
        low[rows[~is_enough]] = middle[~is_enough] + 1
    return high


def is_safe(setting: Setting, device_bytes: FloatColumn, host_bytes: FloatColumn) -> BoolColumn:
    """Whether bytes fit devices and nodes."""
    fits: BoolColumn = device_bytes <= setting.limit.limit_bytes
    return fits & (host_bytes <= setting.host_limit.limit_bytes)
