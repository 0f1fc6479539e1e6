"""Candidates that are priced together: splits with step techniques on one side, the few splits that differ in their
model states on the other. A candidate is the sum of the two parts (memory/grouped_pricing.py, timing/step.py).

Some amounts are solved exactly for each split: recomputed and offloaded layers. Every further layer needs no more
memory and takes no less time, so the fewest that are safe are the fastest, and bisection finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn, NarrowColumn
from llmlaunch.frameworks.base import StepTechniques
from llmlaunch.frozen import frozen
from llmlaunch.layout import OFFLOAD_LAYERS, RECOMPUTE_LAYERS, RECOMPUTE_NONE, LayoutColumns, Modules
from llmlaunch.memory.grouped_pricing import (
    ModelStateBytes,
    TransientBytes,
    WorstBytes,
    model_state_bytes,
    transient_bytes,
    worst_of_sums,
)
from llmlaunch.memory.job import Job
from llmlaunch.models.shape import ModelShape
from llmlaunch.planner.points import Rows
from llmlaunch.planner.search_space import TechniqueSpace, technique_values
from llmlaunch.planner.setting import Setting, node_of
from llmlaunch.timing.passes import PassSeconds, pass_seconds
from llmlaunch.timing.step import (
    StageParameters,
    UpdateSeconds,
    combined,
    counted_by_stage,
    most_parameters,
    update_seconds,
)


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
    """One of some `alike_steps`, at `index` of the technique space, for each of `rows` of the splits. `state_of` maps a
    row to its split of a `ModelStateBatch`; `solved` names the amount to be solved, and `none_searched` says whether
    layouts with none of it are searched too. `timed` are the passes where they are known already."""

    setting: Setting
    job: Job
    index: IntColumn
    rows: IntColumn
    layouts: LayoutColumns
    state_of: IntColumn
    solved: str | None = None
    none_searched: bool = True
    timed: PassSeconds | None = None

    @cached_property
    def transient(self) -> TransientBytes:
        return transient_bytes(self.job, self.layouts, node_of(self.setting.recipe))

    @cached_property
    def passes(self) -> PassSeconds:
        return pass_seconds(self.job, self.setting.cluster, self.layouts) if self.timed is None else self.timed

    @cached_property
    def with_none(self) -> TechniqueBatch:
        """The same candidates with the solved amount set to zero."""
        if self.solved == RECOMPUTE_LAYERS:
            layouts = self.layouts.with_techniques(0, RECOMPUTE_NONE, 0, self.layouts.offload_layers)
            return replace(self, layouts=layouts, timed=None)
        return self.with_amount(np.zeros(len(self.layouts), dtype=np.int64))

    @cached_property
    def with_all(self) -> TechniqueBatch:
        """The same candidates with the largest possible amount."""
        assert self.solved is not None
        return self.with_amount(largest_amount(self.job.shape, self.layouts, self.solved))

    def with_amount(self, amount: IntColumn) -> TechniqueBatch:
        assert self.solved is not None
        return replace(self, layouts=self.layouts.with_amount(self.solved, amount), timed=None)

    def take(self, index: BoolColumn | IntColumn) -> TechniqueBatch:
        """Return some of the rows, with their passes where these are known already."""
        rows, layouts, state_of = self.rows[index], self.layouts.take(index), self.state_of[index]
        timed = None if self.timed is None else self.timed.take(index)
        return replace(self, index=self.index[index], rows=rows, layouts=layouts, state_of=state_of, timed=timed)

    def bytes_with(self, states: ModelStateBatch) -> WorstBytes:
        return worst_of_sums(self.transient, states.states, self.state_of)

    def safe_with(self, states: ModelStateBatch) -> BoolColumn:
        """Whether each candidate fits devices and nodes."""
        worst = self.bytes_with(states)
        return is_safe(self.setting, worst.device_bytes, worst.host_bytes)

    def step_seconds(self, update: UpdateSeconds) -> FloatColumn:
        """Return the seconds of one training step for each candidate. `update` holds the optimizer-step seconds of the
        splits that share model states, or those with several state techniques: then so does the result."""
        return combined(self.passes, update.take(self.state_of)).total

    def priced_with(self, states: ModelStateBatch, seconds: FloatColumn | None = None) -> Rows:
        """Return bytes and seconds of each candidate; `seconds` are those of a step where they were computed before."""
        worst = self.bytes_with(states)
        return Rows(
            split=self.rows.astype(np.int32),
            step_techniques=self.index.astype(np.int32),
            state_techniques=states.index[self.state_of],
            recompute_layers=self.layouts.recompute_layers.astype(np.int32),
            offload_layers=self.layouts.offload_layers.astype(np.int32),
            device_bytes=worst.device_bytes,
            worst_pipeline_rank=worst.pipeline_rank.astype(np.int32),
            host_bytes=worst.host_bytes,
            step_seconds=self.step_seconds(states.update) if seconds is None else seconds,
        )


def alike_steps(space: TechniqueSpace, steps: Iterable[int]) -> list[IntColumn]:
    """Group step techniques that differ in recompute and in the modules they offload alone: layouts with any of a group
    are priced together (`apply_alike`)."""
    groups: dict[StepTechniques, list[int]] = {}
    for index in steps:
        groups.setdefault(space.step[index].without_modules, []).append(index)
    return [np.array(group) for group in groups.values()]


def apply_alike(
    setting: Setting, space: TechniqueSpace, steps: IntColumn, state: int, splits: LayoutColumns
) -> tuple[Job, LayoutColumns]:
    """Return the job and the splits with the step techniques at `steps`, one for each split and all of one group of
    `alike_steps`, and the state techniques at `state`. A solved amount is set to 1."""
    different, place = np.unique(steps, return_inverse=True)
    used, techniques = [space.step[index] for index in different.tolist()], space.state[state]
    values = [technique_values(step, techniques) for step in used]
    columns = {name: np.array([each[name] for each in values])[place] for name in ("recompute", RECOMPUTE_LAYERS)}
    layouts = splits.with_techniques(
        techniques.zero_stage, offload_layers=values[0][OFFLOAD_LAYERS] if values else 0, **columns
    )
    sets = tuple(Modules(step.recompute_modules, step.offload_modules) for step in used)
    plain = used[0].without_modules if used else space.own
    return setting.job_with(plain, techniques), replace(layouts, modules=place, module_sets=sets)


def group_equal(setting: Setting, space: TechniqueSpace) -> list[list[int]]:
    """Group the indices of state techniques whose facts are equal: what the step adds is priced once for a group."""
    groups: dict[object, list[int]] = {}
    for index in range(len(space.state)):
        groups.setdefault(state_job(setting, space, index).facts, []).append(index)
    return list(groups.values())


def state_job(setting: Setting, space: TechniqueSpace, index: int) -> Job:
    """Return the job with the state techniques at `index`."""
    return setting.job_with(space.step[0], space.state[index])


def state_batches(
    setting: Setting, space: TechniqueSpace, indices: Sequence[int], distinct: LayoutColumns
) -> list[ModelStateBatch]:
    """Return the batches of some state techniques whose facts are equal."""
    updates = state_updates(setting, space, indices, distinct)
    return [
        state_batch(setting, space, index, distinct, update) for index, update in zip(indices, updates, strict=True)
    ]


def state_batch(
    setting: Setting, space: TechniqueSpace, index: int, distinct: LayoutColumns, update: UpdateSeconds
) -> ModelStateBatch:
    layouts = distinct.with_techniques(space.state[index].zero_stage, 0, 0, 0)
    states = model_state_bytes(state_job(setting, space, index), layouts, node_of(setting.recipe))
    return ModelStateBatch(np.full(len(layouts), index, dtype=np.int32), states, update)


def state_updates(
    setting: Setting, space: TechniqueSpace, indices: Sequence[int], distinct: LayoutColumns
) -> list[UpdateSeconds]:
    """Return the update seconds of some state techniques whose facts are equal, without their bytes. Parameters are
    counted once for all of them, or once for each ZeRO stage."""
    counted: dict[int, StageParameters] = {}
    updates = []
    for index in indices:
        job, stage = state_job(setting, space, index), space.state[index].zero_stage
        layouts = distinct.with_techniques(stage, 0, 0, 0)
        key = stage if counted_by_stage(job) else 0
        if key not in counted:
            counted[key] = most_parameters(job, layouts)
        updates.append(update_seconds(job, setting.cluster, layouts, counted[key]))
    return updates


def fewest_amounts(batch: TechniqueBatch, states: Sequence[ModelStateBatch], allowed: BoolColumn) -> Rows:
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
    most: IntColumn = np.maximum(layers if name == RECOMPUTE_LAYERS else layers - 1, 1)
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
