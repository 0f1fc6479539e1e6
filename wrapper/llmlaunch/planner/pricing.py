"""Bytes and seconds of every legal split with every combination of techniques, solved amounts included.

Activations and passes are priced once for each set of step techniques. Model states and the optimizer step are priced
once for each set of state techniques and the few splits that differ in them. A candidate is the sum of the two parts
(memory/grouped_pricing.py, timing/step.py).

Some amounts are solved exactly for each split: recomputed and offloaded layers. Every further layer needs no more
memory and takes no less time, so the fewest that are safe are the fastest, and bisection finds them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cached_property

import numpy as np

from llmlaunch.backends.base import StateTechniques, StepTechniques
from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn
from llmlaunch.frozen import frozen
from llmlaunch.layout import RECOMPUTE_NONE, Layout, LayoutColumns, Rule, Situation, refusal_counts
from llmlaunch.memory.grouped_pricing import (
    ModelStateBytes,
    TransientBytes,
    WorstBytes,
    distinct_states,
    model_state_bytes,
    transient_bytes,
    worst_of_sums,
)
from llmlaunch.memory.job import Job
from llmlaunch.models.shape import ModelShape
from llmlaunch.planner.search_space import TechniqueSpace, apply_techniques, recipe_with_techniques, switches_matter
from llmlaunch.planner.setting import Setting, node_of
from llmlaunch.recipe.types import Recipe
from llmlaunch.timing.passes import PassSeconds, pass_seconds
from llmlaunch.timing.step import UpdateSeconds, combined, update_seconds

__all__ = [
    "Points",
    "Rows",
    "TechniqueBatch",
    "first_failed",
    "group_equal",
    "is_safe",
    "legal_rows",
    "price",
    "situation",
    "state_batch",
    "state_job",
    "state_update",
]


@frozen
class Rows:
    """Priced points as columns: indices of the split and of each kind of techniques, the amounts, and the costs. Bytes
    are of the worst pipeline rank's device and of a node."""

    split: IntColumn
    step_techniques: IntColumn
    state_techniques: IntColumn
    recompute_layers: IntColumn
    offload_layers: IntColumn
    device_bytes: FloatColumn
    worst_pipeline_rank: IntColumn
    host_bytes: FloatColumn
    step_seconds: FloatColumn

    def __len__(self) -> int:
        return len(self.split)

    def take(self, mask: BoolColumn) -> Rows:
        return Rows(**{f.name: getattr(self, f.name)[mask] for f in fields(self)})


def join_rows(blocks: Sequence[Rows]) -> Rows:
    """Concatenate blocks of rows."""
    return Rows(**{f.name: np.concatenate([getattr(block, f.name) for block in blocks]) for f in fields(Rows)})


@frozen
class Points:
    """`rows` over the splits and the techniques they point to."""

    splits: LayoutColumns
    step_techniques: Sequence[StepTechniques]
    state_techniques: Sequence[StateTechniques]
    rows: Rows

    def __len__(self) -> int:
        return len(self.rows.split)

    def extended(self, splits: Sequence[LayoutColumns], blocks: Sequence[Rows]) -> Points:
        """Return these points and more: each block of rows over splits of its own."""
        starts = np.cumsum([len(self.splits), *(len(more) for more in splits)])[: len(blocks)]
        moved = [replace(block, split=block.split + start) for block, start in zip(blocks, starts, strict=True)]
        return replace(self, splits=LayoutColumns.joined([self.splits, *splits]), rows=join_rows([self.rows, *moved]))

    def techniques(self, index: int) -> tuple[StepTechniques, StateTechniques]:
        return (
            self.step_techniques[self.rows.step_techniques[index]],
            self.state_techniques[self.rows.state_techniques[index]],
        )

    def layout(self, index: int) -> Layout:
        return self._layouts_at(np.array([index])).row(0)

    @cached_property
    def layouts(self) -> LayoutColumns:
        """All points as layouts, built on first use."""
        return self._layouts_at(np.arange(len(self)))

    def column(self, name: str) -> IntColumn:
        """Return one layout field of all points without building layouts."""
        if name == "zero_stage":
            return self._zero_stages[self.rows.state_techniques]
        if name == "recompute":
            return self._recompute_codes[self.rows.step_techniques]
        if name in ("recompute_layers", "offload_layers"):
            amount: IntColumn = getattr(self.rows, name)
            return amount
        column: IntColumn = getattr(self.splits, name)[self.rows.split]
        return column

    def _layouts_at(self, index: IntColumn) -> LayoutColumns:
        rows = self.rows
        return replace(
            self.splits.take(rows.split[index]),
            zero_stage=self._zero_stages[rows.state_techniques[index]],
            recompute=self._recompute_codes[rows.step_techniques[index]],
            recompute_layers=rows.recompute_layers[index],
            offload_layers=rows.offload_layers[index],
        )

    @property
    def _zero_stages(self) -> IntColumn:
        return np.array([state.zero_stage for state in self.state_techniques], dtype=np.int64)

    @property
    def _recompute_codes(self) -> IntColumn:
        return np.array([step.recompute for step in self.step_techniques], dtype=np.int64)


@frozen
class ModelStateBatch:
    """One set of state techniques, at `index` of the technique space, over the few splits that differ in their model
    states."""

    index: int
    states: ModelStateBytes
    update: UpdateSeconds


@frozen
class TechniqueBatch:
    """One set of step techniques, at `index` of the technique space, over `rows` of the splits. `state_of` maps each
    row to its split of a `ModelStateBatch`; `solved` names the amount to be solved, and `none_searched` says whether
    layouts with none of it are searched too."""

    setting: Setting
    job: Job
    index: int
    rows: IntColumn
    layouts: LayoutColumns
    state_of: IntColumn
    solved: str | None = None
    none_searched: bool = True

    @cached_property
    def transient(self) -> TransientBytes:
        return transient_bytes(self.job, self.layouts, node_of(self.setting.recipe))

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
        return replace(self, rows=self.rows[index], layouts=self.layouts.take(index), state_of=self.state_of[index])

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
        worst, count = self.bytes_with(states), len(self.rows)
        return Rows(
            split=self.rows,
            step_techniques=np.full(count, self.index),
            state_techniques=np.full(count, states.index),
            recompute_layers=self.layouts.recompute_layers,
            offload_layers=self.layouts.offload_layers,
            device_bytes=worst.device_bytes,
            worst_pipeline_rank=worst.pipeline_rank,
            host_bytes=worst.host_bytes,
            step_seconds=self.step_seconds(states.update) if seconds is None else seconds,
        )


def price(
    setting: Setting, splits: LayoutColumns, space: TechniqueSpace, rules: Sequence[Rule]
) -> tuple[Points, Counter[str]]:
    """Return all points of the legal `splits`, and how many each of the `rules`, which look at techniques, refuses."""
    blocks: list[Rows] = []
    refused: Counter[str] = Counter()
    distinct, state_of = distinct_states(setting.job, splits)
    for indices in group_equal(setting, space):
        batches = [state_batch(setting, space, index, distinct) for index in indices]
        for i in range(len(space.step)):
            legal = [legal_rows(setting, space, (i, batch.index), splits, rules, refused) for batch in batches]
            rows = np.flatnonzero(np.any(legal, axis=0))
            batch = _technique_batch(setting, space, (i, indices[0]), splits.take(rows), rows, state_of[rows])
            blocks += [_block(batch, states, mine[rows]) for states, mine in zip(batches, legal, strict=True)]
    return Points(splits, space.step, space.state, join_rows(blocks)), refused


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
    return ModelStateBatch(index, states, update_seconds(job, setting.cluster, layouts))


def state_update(setting: Setting, space: TechniqueSpace, index: int, distinct: LayoutColumns) -> UpdateSeconds:
    """Return the update seconds of the state techniques at `index`, without their bytes."""
    layouts = distinct.with_techniques(space.state[index].zero_stage, 0, 0, 0)
    return update_seconds(state_job(setting, space, index), setting.cluster, layouts)


def legal_rows(
    setting: Setting,
    space: TechniqueSpace,
    indices: tuple[int, int],
    splits: LayoutColumns,
    rules: Sequence[Rule],
    refused: Counter[str],
) -> BoolColumn:
    """Return whether each split can be tried with the techniques at `indices`, as far as the rules look at techniques.
    Refusals are added to `refused`, but for those of switches that nobody asked for: the split is tried without them,
    and where they change nothing it is the same layout."""
    failed = first_failed(rules, situation(*apply_techniques(setting.recipe, space, indices, splits)))
    legal: BoolColumn = failed < 0
    switches = space.switches[indices[0]]
    if switches:
        return legal & switches_matter(switches, splits)
    refused.update(refusal_counts(rules, failed))
    return legal


def _technique_batch(
    setting: Setting,
    space: TechniqueSpace,
    indices: tuple[int, int],
    splits: LayoutColumns,
    rows: IntColumn,
    state_of: IntColumn,
) -> TechniqueBatch:
    recipe, layouts = apply_techniques(setting.recipe, space, indices, splits)
    step = space.step[indices[0]]
    none_searched = step.keeping_all in space.step
    job = setting.job_of(recipe)
    return TechniqueBatch(setting, job, indices[0], rows, layouts, state_of, step.solved, none_searched)


def _block(batch: TechniqueBatch, states: ModelStateBatch, allowed: BoolColumn) -> Rows:
    """Return the rows of one combination of techniques; where an amount is solved, those that need some of it."""
    if batch.solved is None:
        rows = batch.priced_with(states)
        return rows if np.all(allowed) else rows.take(allowed)
    return _fewest_safe(batch, states, allowed).priced_with(states)


def _fewest_safe(batch: TechniqueBatch, states: ModelStateBatch, allowed: BoolColumn) -> TechniqueBatch:
    """Return the rows that need some of the amount, with the least that is safe, or all of it where nothing is safe.
    Rows that are safe with none of it are left out where those are searched too: they are the same layouts."""
    needed = np.flatnonzero(allowed & ~batch.with_none.safe_with(states) if batch.none_searched else allowed)
    enough, chosen = batch.with_all.safe_with(states)[needed], batch.take(needed)
    most = largest_amount(batch.job.shape, chosen.layouts, str(batch.solved))

    def safe(rows: IntColumn, amount: IntColumn) -> BoolColumn:
        return chosen.take(rows).with_amount(amount).safe_with(states)

    return chosen.with_amount(fewest_safe(safe, most, enough))


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


def situation(recipe: Recipe, layouts: LayoutColumns) -> Situation:
    """Return what the legality rules look at."""
    techniques, numbers = recipe.techniques, recipe.training.numbers
    return Situation(layouts, recipe.model, recipe.workload, recipe.cluster, recipe.nodes, techniques, numbers)


def first_failed(rules: Sequence[Rule], situation: Situation) -> IntColumn:
    """Return the index of the first rule each layout fails, -1 where it passes all: one reason for each refusal."""
    failed = np.full(len(situation.layouts), -1, dtype=np.int64)
    for index, rule in enumerate(rules):
        failed[(failed < 0) & ~rule.allows(situation)] = index
    return failed
