"""Which numbers of nodes cannot hold a model, whatever the layout: a bound for all counts at once, so that the search
for the fewest nodes prices nothing on those.

A rank that keeps i micro-batches holds so many layers and no more, and the ranks of a pipeline keep 1, 2, 3, ... of
them, counted from its end. So one table of layers by kept micro-batches says how long a pipeline must be at least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn
from llmlaunch.frozen import frozen
from llmlaunch.layout import EVEN, LAYOUT_FIELDS, OFFLOAD_LAYERS, LayoutColumns
from llmlaunch.memory.job import Job, RankColumns, layer_kinds, of_classes
from llmlaunch.memory.moments import state_terms, transient_terms
from llmlaunch.memory.peak import StateSums, TransientSums, device_bytes
from llmlaunch.memory.states import states
from llmlaunch.planner.legality import technique_legality
from llmlaunch.planner.pricing_budget import SPLIT_SHARE, count_candidates
from llmlaunch.planner.search_space import (
    MOST_CONTEXT,
    MOST_UNEVEN_CHUNKS,
    TechniqueSpace,
    apply_techniques,
    divisors,
    offered_values,
    pinned_numbers,
    technique_space,
)
from llmlaunch.planner.setting import Setting
from llmlaunch.planner.stage_capacities import most_that_fit
from llmlaunch.planner.technique_batches import group_equal

__all__ = ["LeastDevices"]

COARSE, FINE = 1.25, 1.003  # growth of the kept micro-batches from one column of a table to the next
NEVER = 2**40  # ranks of a pipeline
MOST_PRICED = 60_000  # splits times step techniques, of whose activations something is known
AT_ONCE = 1.1  # splits refined together: those that need as many devices


class LeastDevices:
    """For every split of devices without a pipeline, the fewest ranks of one that may hold the model. Nothing is
    bounded where layers differ in more than their kind, or where a rehearsal may allow what the estimate refuses."""

    def __init__(self, setting: Setting, most_devices: int) -> None:
        recipe = setting.recipe
        self._bounded = setting.job.techniques.trained_layers is None and not setting.lessons.rehearsals
        splits = _free_splits(setting, most_devices if self._bounded else 0)
        self._devices = splits.tensor * splits.context * splits.data
        # those of a pin, or those that the backend offers where that are not all
        self._pipelines = pinned_numbers(recipe, "pipeline") or setting.backend.space(recipe).pipeline
        self._alone = np.zeros(len(splits), dtype=np.bool_)
        self._fewest, self._fine = np.full(len(splits), NEVER), np.zeros(len(splits), dtype=np.bool_)
        self._even: dict[int, BoolColumn] = {}
        self._tables: list[_Table] = []
        space = technique_space(recipe, setting.backend)
        self.loose = not self._bounded or len(splits) * len(space.step) > MOST_PRICED
        if len(splits):
            longest = np.minimum(most_devices // self._devices, recipe.model.num_layers)
            groups = group_equal(setting, space)
            self._tables = [_Table(setting, space, splits, longest, group, self.loose) for group in groups]
        for table in self._tables:
            self._alone |= table.alone()
            self._fewest = np.minimum(self._fewest, table.fewest(np.arange(len(splits)), COARSE))
            for length, may in zip(table.even_lengths, table.even().T, strict=True):
                self._even[length] = self._even.get(length, False) | may

    def may_hold(self, world: int) -> bool:
        """Whether so many devices may hold the model; where not, no layout of them is safe."""
        if not self._bounded:
            return True
        while True:
            exact, may = self._may_hold(world)
            if np.any(exact | (may & self._fine)):
                return True
            if not np.any(may):
                return False
            needed = self._devices * self._fewest
            self._refine(np.flatnonzero(~self._fine & (may | (needed <= AT_ONCE * world))))

    def _may_hold(self, world: int) -> tuple[BoolColumn, BoolColumn]:
        """Return which splits may hold the model on so many devices in one rank or in even stages, and which in a
        pipeline cut anywhere."""
        ranks, rest = np.divmod(world, self._devices)
        possible = (rest == 0) & (np.isin(ranks, self._pipelines) if self._pipelines else True)
        even = (ranks == 1) & self._alone
        for length, may in self._even.items():
            even |= (ranks == length) & may
        return possible & even, possible & (ranks > 1) & (ranks >= self._fewest)

    def _refine(self, rows: IntColumn) -> None:
        self._fine[rows] = True
        self._fewest[rows] = np.minimum.reduce([table.fewest(rows, FINE) for table in self._tables])


def _free_splits(setting: Setting, most_devices: int) -> LayoutColumns:
    """Return all that devices may be split into beside pipelines, with the fewest sequences in a micro-batch, which
    keep least."""
    recipe = setting.recipe
    # Sizes are offered where they divide the devices; this many nodes are divided by all of them.
    largest = replace(recipe, nodes=math.lcm(*range(1, MOST_CONTEXT + 1)))
    space, batch = setting.backend.space(largest), recipe.workload.global_batch_size

    def values(name: str) -> Sequence[int]:
        if name == "data":
            return pinned_numbers(recipe, name) or divisors(batch, most_devices)
        return pinned_numbers(recipe, name) or offered_values(largest, space, name)

    names = ("tensor", "context", "data", "expert", "expert_tensor", "sequence_parallel")
    grid = np.meshgrid(*(np.array(values(name), dtype=np.int64) for name in names), indexing="ij")
    sizes = dict(zip(names, (column.ravel() for column in grid), strict=True))
    devices = sizes["tensor"] * sizes["context"] * sizes["data"]
    possible = (devices <= most_devices) & (devices % (sizes["expert"] * sizes["expert_tensor"]) == 0)
    possible &= recipe.model.num_attention_heads % sizes["tensor"] == 0
    possible &= recipe.workload.sequence_length % sizes["context"] == 0
    count = int(np.count_nonzero(possible))
    columns: dict[str, Any] = {name: np.zeros(count, dtype=np.int64) for name in (*LAYOUT_FIELDS, "partition")}
    columns |= {name: column[possible] for name, column in sizes.items()}
    columns |= {name: np.ones(count, dtype=np.int64) for name in ("pipeline", "virtual_pipeline")}
    columns["micro_batch_size"] = np.full(count, min(values("micro_batch_size")))
    return LayoutColumns(**columns, partitions=EVEN)


@frozen
class _Ranks:
    """Ranks of pipelines of the splits at `rows`: of `pipeline` ranks the one at `rank`, with so many layers of the
    heavier kind, or of the lighter one."""

    rows: IntColumn
    pipeline: IntColumn
    rank: IntColumn
    layers: IntColumn
    heavy: BoolColumn

    def take(self, index: BoolColumn | IntColumn) -> _Ranks:
        return _Ranks(*(getattr(self, f.name)[index] for f in fields(self)))

    @classmethod
    def joined(cls, several: Sequence[_Ranks]) -> _Ranks:
        return cls(*(np.concatenate([getattr(each, f.name) for each in several]) for f in fields(cls)))

    def columns(
        self, setting: Setting, space: TechniqueSpace, splits: LayoutColumns, step: int, state: int
    ) -> tuple[Job, RankColumns]:
        """Return the job with these techniques and the ranks with them; an amount of layers is all there are."""
        recipe, layouts = apply_techniques(setting.recipe, space, (step, state), splits.take(self.rows))
        layouts, solved = replace(layouts, pipeline=self.pipeline), space.step[step].solved
        if solved is not None:
            layouts = layouts.with_amount(solved, np.maximum(self.layers - (solved == OFFLOAD_LAYERS), 1))
        job, count = setting.job_of(recipe), self.layers.astype(np.float64)
        batches = np.maximum(layouts.num_microbatches(job.workload.global_batch_size), 1)
        mixtures = count * (self.heavy & (job.shape.moe is not None and any(layer_kinds(job.shape))))
        return job, of_classes(job, layouts, self.rank, batches, count - mixtures, mixtures)


class _Table:
    """How many layers of the heavier kind a rank can hold at most, by split, step techniques and the micro-batches it
    keeps, with the best of the state techniques of a group. Techniques that need no less than others at the corners of
    the table are left out: every term grows evenly with layers and with micro-batches."""

    def __init__(
        self,
        setting: Setting,
        space: TechniqueSpace,
        splits: LayoutColumns,
        longest: IntColumn,
        group: Sequence[int],
        states_alone: bool,
    ) -> None:
        self._setting, self._space, self._splits, self._longest = setting, space, splits, longest
        self._states_alone = states_alone
        kinds = layer_kinds(setting.recipe.model)
        self._layers = sum(kinds) or len(kinds)
        self._lighter_ends = 0 < sum(kinds) < len(kinds)
        even = setting.recipe.layers_by_stage is None and not self._lighter_ends
        self.even_lengths = divisors(len(kinds), int(longest.max()))[1:] if even else ()
        self._uneven: Sequence[int] = () if even else range(len(space.step))
        if even and setting.backend.space(setting.recipe).uneven:
            self._uneven = space.step_without_amounts
        chunks = pinned_numbers(setting.recipe, "virtual_pipeline")
        self._interleaved = not chunks or max(chunks) > 1
        facts, self._inner_limit_bytes = setting.job.facts, setting.limit.limit_bytes
        if "neighbours" in facts.exchange.groups:  # of which the first rank has one
            self._inner_limit_bytes += math.ceil(facts.exchange.communicator_bytes)
        batches = np.maximum(splits.num_microbatches(setting.recipe.workload.global_batch_size), 1)
        self._most_microbatches = np.maximum(np.minimum(longest, batches), 1)
        ones = np.ones_like(longest)
        single, corners = self._alone(), _Ranks.joined([*self._ends(), *self._inner_corners()])
        self._states: Sequence[int] = group
        self._legal_alone = self._legal = np.ones((1, len(space.state), len(splits)), dtype=np.bool_)
        if not states_alone:
            self._legal_alone, self._legal = self._legality(ones), self._legality(2 * ones, np.maximum(longest, 2))
        self._states = _least(group, partial(self._state_columns, _Ranks.joined([single, corners])))
        self._alone_steps = self._steps = self._uneven_steps = [0]
        if not states_alone:
            self._alone_steps = self._least_steps(self._legal_alone, single, range(len(space.step)))
            self._steps = self._least_steps(self._legal, corners, range(len(space.step))) if even else []
            self._uneven_steps = self._least_steps(self._legal, corners, self._uneven)

    def alone(self) -> BoolColumn:
        """Whether one rank may hold all layers of each split."""
        may = np.zeros(len(self._splits), dtype=np.bool_)
        for step in self._alone_steps:
            may |= self._fits(step, self._alone(), self._legal_alone)
        return may

    def fewest(self, rows: IntColumn, growth: float) -> IntColumn:
        """Return the fewest ranks of a pipeline, two at least, that may hold all layers of some splits however they are
        cut."""
        fewest = np.full(len(rows), NEVER)
        for step in self._uneven_steps:
            may = self._legal[step].any(axis=0) & (self._longest > 1)
            for ranks in self._ends():
                may[may] &= self._fits(step, ranks.take(may), self._legal, placed=False)
            some = np.flatnonzero(may[rows])
            if len(some):
                fewest[some] = np.minimum(fewest[some], self._fewest_with(step, rows[some], growth))
        return fewest

    def even(self) -> BoolColumn:
        """Return whether the first rank of a pipeline of each length (column) may hold its share of each split's layers
        (row) in even stages."""
        may = np.zeros((len(self._splits), len(self.even_lengths)), dtype=np.bool_)
        ones = np.ones_like(self._longest)
        for column, length in enumerate(self.even_lengths):
            ranks = self._ranks(length * ones, 0, self._layers // length * ones)
            for step in self._steps:
                some = np.flatnonzero(self._legal[step].any(axis=0) & (self._longest >= length) & ~may[:, column])
                may[some, column] = self._fits(step, ranks.take(some), self._legal, placed=False)
        return may

    def _fewest_with(self, step: int, rows: IntColumn, growth: float) -> IntColumn:
        """Return the same for one set of step techniques. What a rank holds that keeps so many micro-batches bounds
        what those hold that keep a few more."""
        levels = _levels(1 if self._states_alone else int(self._most_microbatches[rows].max()), growth)
        row, level = np.nonzero(levels <= self._most_microbatches[rows][:, None])
        ranks = self._inner(rows[row], levels[level], np.ones_like(row))

        def bytes_of(cells: IntColumn, layers: IntColumn) -> FloatColumn:
            return self._bytes(step, replace(ranks.take(cells), layers=layers), self._legal)

        most = np.zeros((len(rows), len(levels)), dtype=np.int64)
        most[row, level] = most_that_fit(bytes_of, np.full(len(row), self._layers), self._inner_limit_bytes)
        lengths = np.arange(1, int(self._longest[rows].max()) + 1)
        at = np.searchsorted(levels, np.minimum(lengths, self._most_microbatches[rows][:, None]), side="right") - 1
        enough = np.cumsum(np.take_along_axis(most, at, axis=1), axis=1) >= self._layers
        if self._interleaved:
            enough[:, 1:] |= self._holds_chunks(step, rows, growth)[:, 1 : len(lengths)]
        enough &= lengths <= self._longest[rows][:, None]
        fewest: IntColumn = np.where(enough.any(axis=1), np.maximum(enough.argmax(axis=1) + 1, 2), NEVER)
        return fewest

    def _holds_chunks(self, step: int, rows: IntColumn, growth: float) -> BoolColumn:
        """Return whether the second rank of a pipeline of each length (column, from 1) may hold its layers in several
        chunks, which keep no less than one chunk does."""
        longest = self._longest[rows]
        levels = _levels(int(longest.max()), growth)
        row, level = np.nonzero(levels <= longest[:, None])
        needed = self._layers_in_chunks(np.append(levels[1:], longest.max() + 1) - 1)[level]
        microbatches = np.clip(levels[level] - 1, 1, self._most_microbatches[rows[row]])
        ranks = self._inner(rows[row], microbatches, np.maximum(needed, 1))
        fits = np.zeros((len(rows), len(levels)), dtype=np.bool_)
        fits[row, level] = (needed <= 0) | (
            self._bytes(step, ranks, self._legal, placed=False) <= self._inner_limit_bytes
        )
        lengths = np.searchsorted(levels, np.arange(1, int(longest.max()) + 1), side="right") - 1
        holds: BoolColumn = fits[:, lengths]
        return holds

    def _layers_in_chunks(self, pipeline: IntColumn) -> IntColumn:
        """Return how many layers of the heavier kind the second rank of a pipeline holds at least in several chunks:
        all but the first and the last chunk of the model, which is one of the second of two ranks, are as long."""
        layers = len(layer_kinds(self._setting.recipe.model))
        needed: IntColumn = -(-layers // pipeline) - (layers - self._layers)
        return needed - np.where(pipeline <= 2, MOST_UNEVEN_CHUNKS, 0)

    def _ranks(
        self, pipeline: IntColumn, rank: int, layers: IntColumn, heavy: bool = True, rows: IntColumn | None = None
    ) -> _Ranks:
        rows = np.arange(len(self._splits)) if rows is None else rows
        return _Ranks(rows, pipeline, np.full(len(rows), rank), layers, np.full(len(rows), heavy))

    def _alone(self) -> _Ranks:
        ones = np.ones_like(self._longest)
        return self._ranks(ones, 0, self._layers * ones)

    def _inner(self, rows: IntColumn, microbatches: IntColumn, layers: IntColumn) -> _Ranks:
        """Return ranks that keep so many micro-batches: the second of one rank more, which has a neighbour on either
        side where that are three."""
        return self._ranks(microbatches + 1, 1, layers, rows=rows)

    def _ends(self) -> list[_Ranks]:
        """Return the first and the last rank of the shortest pipeline with one layer, of the lighter kind where there
        is one: a longer pipeline needs no less."""
        ones, heavy = np.ones_like(self._longest), not self._lighter_ends
        return [self._ranks(2 * ones, rank, ones, heavy) for rank in (0, 1)]

    def _inner_corners(self) -> Iterator[_Ranks]:
        rows, ones = np.arange(len(self._splits)), np.ones_like(self._longest)
        for microbatches in (ones, self._most_microbatches):
            for layers in (ones, self._layers * ones):
                yield self._inner(rows, microbatches, layers)

    def _legality(self, *pipelines: IntColumn) -> BoolColumn:
        """Return whether the rules that look at techniques allow each set of step techniques with each of the state
        techniques in each split, with any of these pipelines (steps x states x splits)."""
        recipe, space = self._setting.recipe, self._space
        rules = [rule for rule in self._setting.backend.rules(recipe) if rule.of_techniques]
        legal = np.zeros((len(space.step), len(space.state), len(self._splits)), dtype=np.bool_)
        for pipeline in pipelines:
            layouts = replace(self._splits, pipeline=pipeline)
            legality = technique_legality(recipe, space, layouts, rules, range(len(space.step)))
            legal |= np.array(legality.masks)[legality.mask_of]
        return legal

    def _least_steps(self, legal: BoolColumn, corners: _Ranks, among: Sequence[int]) -> list[int]:
        def columns(step: int) -> list[FloatColumn]:
            sums = self._transient(step, corners)
            of_states = legal[step][self._states]
            named = (*sums.moments, sums.outside, sums.holes, sums.cut, sums.lone)
            there = of_states.any(axis=0)[corners.rows]
            parts = [np.where(there, column, np.inf) for column in named if column is not None]
            return [*parts, (~of_states).astype(np.float64).ravel()]

        return _least([step for step in among if legal[step][self._states].any()], columns)

    def _state_columns(self, corners: _Ranks, state: int) -> list[FloatColumn]:
        sums = self._model_states(state, corners)
        named = (*sums.moments, sums.outside, sums.placed, sums.flat, *sums.other_streams)
        refused = [(~legal[:, state]).astype(np.float64).ravel() for legal in (self._legal_alone, self._legal)]
        return [*(column for column in named if column is not None), *refused]

    def _fits(self, step: int, ranks: _Ranks, legal: BoolColumn, placed: bool = True) -> BoolColumn:
        fits: BoolColumn = self._bytes(step, ranks, legal, placed) <= self._setting.limit.limit_bytes
        return fits

    def _bytes(self, step: int, ranks: _Ranks, legal: BoolColumn, placed: bool = True) -> FloatColumn:
        """Return the least device bytes with any of the state techniques that are `legal` with the step techniques,
        with or without the moment before the first step: a model is moved into its buffers by chunks."""
        least, transient = np.full(len(ranks.rows), np.inf), None
        for state in self._states:
            allowed = legal[step, state, ranks.rows]
            if not np.any(allowed):
                continue
            model_states = self._model_states(state, ranks)
            if transient is None:
                transient = _nothing(model_states) if self._states_alone else self._transient(step, ranks)
            device = device_bytes(transient, model_states if placed else replace(model_states, placed=None))
            least = np.where(allowed, np.minimum(least, device), least)
        return least

    def _transient(self, step: int, ranks: _Ranks) -> TransientSums:
        self._count(ranks)
        job, rows = ranks.columns(self._setting, self._space, self._splits, step, self._states[0])
        return TransientSums.of(job, rows, transient_terms(job, rows))

    def _model_states(self, state: int, ranks: _Ranks) -> StateSums:
        self._count(ranks)
        job, rows = ranks.columns(self._setting, self._space, self._splits, 0, state)
        model_states = states(job, rows)
        return StateSums.of(job, rows, state_terms(job, rows, model_states), model_states)

    def _count(self, ranks: _Ranks) -> None:
        """Count ranks before they are priced, many together; whole matrices of an optimizer are packed one by one."""
        count_candidates(len(ranks.rows) * (1.0 if self._setting.recipe.training.muon else SPLIT_SHARE))


def _nothing(model_states: StateSums) -> TransientSums:
    """Return no bytes beside model states."""
    none = np.zeros_like(model_states.outside)
    return TransientSums(tuple(none for _ in model_states.moments), none, None, None, None, None)


def _levels(most: int, growth: float) -> IntColumn:
    """Return whole numbers from 1 to `most`, each larger than the one before by at least this factor."""
    levels = [1]
    while (level := max(levels[-1] + 1, int(levels[-1] * growth))) <= most:
        levels.append(level)
    return np.array(levels)


Name = TypeVar("Name", bound=Hashable)


def _least(names: Iterable[Name], columns_of: Callable[[Name], Sequence[FloatColumn]]) -> list[Name]:
    """Return the names of which no other one's columns are as small everywhere."""
    columns = {name: np.concatenate(columns_of(name)) for name in names}
    least: list[Name] = []
    for name in sorted(columns, key=lambda name: float(columns[name][np.isfinite(columns[name])].sum())):
        alike = (columns[other] for other in least if len(columns[other]) == len(columns[name]))
        if not any(np.all(other <= columns[name]) for other in alike):
            least.append(name)
    return least
