"""Bytes and seconds of every legal split with every set of words, amounts solved.

What runs is worked out once for each set of running words, what is held once for each set of held words and the few
splits that differ in it; a point is the sum of two halves (memory/halves.py, timing/step.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llmlaunch.backends.base import StepTechniques
from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn
from llmlaunch.layout import RECOMPUTE_NONE, LayoutColumns, Rule, Situation, refusal_counts
from llmlaunch.memory.halves import (
    HeldHalf,
    RunningHalf,
    Worst,
    distinct_held,
    held_half,
    running_half,
    worst_of_halves,
)
from llmlaunch.memory.job import Job
from llmlaunch.models.shape import ModelShape
from llmlaunch.planner.points import Points, Rows, join_rows
from llmlaunch.planner.search_space import TechniqueSpace, apply_techniques, recipe_with_techniques
from llmlaunch.planner.setting import Setting, node_of
from llmlaunch.recipe.types import Recipe
from llmlaunch.timing.running import Running, running
from llmlaunch.timing.step import step_seconds
from llmlaunch.timing.update import Update, update

__all__ = [
    "ModelStateBatch",
    "TechniqueBatch",
    "fewest",
    "first_failed",
    "group_equal",
    "is_safe",
    "most_of",
    "price",
    "situation",
    "state_batch",
    "state_job",
    "state_update",
    "without_amount",
]


@dataclass(frozen=True)
class ModelStateBatch:
    """One set of held words, at `place`, over the few splits that differ in what is held."""

    place: int
    half: HeldHalf
    update: Update


@dataclass(frozen=True)
class TechniqueBatch:
    """One set of running words, at `place`, over `rows` of the splits. `held_of` says which of the held splits each is;
    `solved` names the amount to be solved, and `none_searched` whether none of it is among the words too."""

    setting: Setting
    job: Job
    place: int
    rows: IntColumn
    layouts: LayoutColumns
    held_of: IntColumn
    solved: str | None = None
    none_searched: bool = True

    @cached_property
    def half(self) -> RunningHalf:
        return running_half(self.job, self.layouts, node_of(self.setting.recipe))

    @cached_property
    def passes(self) -> Running:
        return running(self.job, self.setting.cluster, self.layouts)

    @cached_property
    def with_none(self) -> TechniqueBatch:
        """The same without what is to be solved."""
        assert self.solved is not None
        return replace(self, layouts=without_amount(self.layouts, self.solved))

    @cached_property
    def with_all(self) -> TechniqueBatch:
        assert self.solved is not None
        return self.with_amount(most_of(self.job.shape, self.layouts, self.solved))

    def with_amount(self, amount: IntColumn) -> TechniqueBatch:
        assert self.solved is not None
        return replace(self, layouts=self.layouts.with_amount(self.solved, amount))

    def take(self, index: NDArray[np.bool_] | IntColumn) -> TechniqueBatch:
        """Some of the rows."""
        return replace(self, rows=self.rows[index], layouts=self.layouts.take(index), held_of=self.held_of[index])

    def bytes_with(self, held: ModelStateBatch) -> Worst:
        return worst_of_halves(self.half, held.half, self.held_of)

    def safe_with(self, held: ModelStateBatch) -> BoolColumn:
        """Fits devices and nodes."""
        worst = self.bytes_with(held)
        return is_safe(self.setting, worst.device_bytes, worst.host_bytes)

    def seconds_with(self, update: Update) -> FloatColumn:
        """Of a step; `update` is of the held splits."""
        return step_seconds(self.passes, update.take(self.held_of))

    def priced_with(self, held: ModelStateBatch) -> Rows:
        return self.priced_at(held, self.seconds_with(held.update))

    def priced_at(self, held: ModelStateBatch, seconds: FloatColumn) -> Rows:
        """Where the seconds of a step are known already."""
        worst, count = self.bytes_with(held), len(self.rows)
        return Rows(
            split=self.rows,
            running=np.full(count, self.place),
            held=np.full(count, held.place),
            recompute_layers=self.layouts.recompute_layers,
            offload_layers=self.layouts.offload_layers,
            device_bytes=worst.device_bytes,
            worst_pipeline_rank=worst.pipeline_rank,
            host_bytes=worst.host_bytes,
            step_seconds=seconds,
        )


def price(
    setting: Setting, splits: LayoutColumns, words: TechniqueSpace, rules: Sequence[Rule]
) -> tuple[Points, Counter[str]]:
    """All points of the legal `splits`, and how many each of the `rules`, which look at the words, refuses."""
    blocks: list[Rows] = []
    refused: Counter[str] = Counter()
    few, held_of = distinct_held(setting.job, splits)
    for places in group_equal(setting, words):
        helds = [state_batch(setting, words, place, few) for place in places]
        for i in range(len(words.running)):
            failed = [_failed(setting, words, (i, held.place), splits, rules) for held in helds]
            for found in failed:
                refused.update(refusal_counts(rules, found))
            rows = np.flatnonzero(np.any([found < 0 for found in failed], axis=0))
            way = _way(setting, words, (i, places[0]), splits.take(rows), rows, held_of[rows])
            allowed = [found[rows] < 0 for found in failed]
            blocks += [_block(way, held, mine) for held, mine in zip(helds, allowed, strict=True)]
    return Points(splits, words.running, words.held, join_rows(blocks)), refused


def group_equal(setting: Setting, words: TechniqueSpace) -> list[list[int]]:
    """Places of the held words, those together whose facts are the same: what runs is worked out once for them."""
    groups: dict[object, list[int]] = {}
    for place in range(len(words.held)):
        groups.setdefault(state_job(setting, words, place).facts, []).append(place)
    return list(groups.values())


def state_job(setting: Setting, words: TechniqueSpace, place: int) -> Job:
    """The job of the held words at `place`."""
    return setting.job_of(recipe_with_techniques(setting.recipe, words.running[0], words.held[place]))


def state_batch(setting: Setting, words: TechniqueSpace, place: int, few: LayoutColumns) -> ModelStateBatch:
    job = state_job(setting, words, place)
    layouts = few.with_techniques(words.held[place].zero_stage, 0, 0, 0)
    return ModelStateBatch(
        place, held_half(job, layouts, node_of(setting.recipe)), state_update(setting, words, place, few)
    )


def state_update(setting: Setting, words: TechniqueSpace, place: int, few: LayoutColumns) -> Update:
    """The held words' seconds alone."""
    return update(
        state_job(setting, words, place), setting.cluster, few.with_techniques(words.held[place].zero_stage, 0, 0, 0)
    )


def is_safe(setting: Setting, device_bytes: FloatColumn, host_bytes: FloatColumn) -> BoolColumn:
    """Fits devices and nodes."""
    fits: BoolColumn = device_bytes <= setting.limit.limit_bytes
    return fits & (host_bytes <= setting.host_limit.limit_bytes)


def _failed(
    setting: Setting, words: TechniqueSpace, places: tuple[int, int], splits: LayoutColumns, rules: Sequence[Rule]
) -> IntColumn:
    said, layouts = apply_techniques(setting.recipe, words, places, splits)
    return first_failed(rules, situation(said, layouts))


def _way(
    setting: Setting,
    words: TechniqueSpace,
    places: tuple[int, int],
    splits: LayoutColumns,
    rows: IntColumn,
    held_of: IntColumn,
) -> TechniqueBatch:
    said, layouts = apply_techniques(setting.recipe, words, places, splits)
    solved, none = words.running[places[0]].solved, StepTechniques() in words.running
    return TechniqueBatch(setting, setting.job_of(said), places[0], rows, layouts, held_of, solved, none)


def _block(way: TechniqueBatch, held: ModelStateBatch, allowed: BoolColumn) -> Rows:
    """The points of one set of words; where an amount is solved, of the splits that need some of it."""
    if way.solved is None:
        rows = way.priced_with(held)
        return rows if np.all(allowed) else rows.take(allowed)
    return _fewest_safe(way, held, allowed).priced_with(held)


def _fewest_safe(way: TechniqueBatch, held: ModelStateBatch, allowed: BoolColumn) -> TechniqueBatch:
    """The rows that need some of the amount, with the least that is safe, or all of it where nothing is. Rows that are
    safe without are left out where those are searched too: they are the same layouts without these words."""
    needed = np.flatnonzero(allowed & ~way.with_none.safe_with(held) if way.none_searched else allowed)
    enough, chosen = way.with_all.safe_with(held)[needed], way.take(needed)
    most = most_of(way.job.shape, chosen.layouts, str(way.solved))

    def safe(rows: IntColumn, amount: IntColumn) -> BoolColumn:
        return chosen.take(rows).with_amount(amount).safe_with(held)

    return chosen.with_amount(fewest(safe, most, enough))


def situation(recipe: Recipe, layouts: LayoutColumns) -> Situation:
    """What the rules look at."""
    asked, numbers = recipe.techniques, recipe.training.numbers
    return Situation(layouts, recipe.model, recipe.workload, recipe.cluster, recipe.nodes, asked, numbers)


def first_failed(rules: Sequence[Rule], situation: Situation) -> IntColumn:
    """Index of the first rule each layout fails, -1 where it passes all: exactly one reason for each refusal."""
    failed = np.full(len(situation.layouts), -1, dtype=np.int64)
    for index, rule in enumerate(rules):
        failed[(failed < 0) & ~rule.allows(situation)] = index
    return failed


def most_of(shape: ModelShape, layouts: LayoutColumns, name: str) -> IntColumn:
    """All layers of a model chunk can be recomputed; one of a rank's stays on the device
    (megatron/core/transformer/transformer_config.py cpu_offloading_num_layers, core 0.19)."""
    even = shape.num_layers // (layouts.pipeline * layouts.virtual_pipeline)
    largest = np.array([max(split, default=0) for split in layouts.partitions])[layouts.partition]
    layers = np.where(layouts.uneven, largest, even)
    most: IntColumn = np.maximum(layers if name == "recompute_layers" else layers - 1, 1)
    return most


def without_amount(layouts: LayoutColumns, name: str) -> LayoutColumns:
    """The same layouts with none of an amount."""
    if name == "recompute_layers":
        return layouts.with_techniques(0, RECOMPUTE_NONE, 0, layouts.offload_layers)
    return layouts.with_amount(name, np.zeros(len(layouts), dtype=np.int64))


def fewest(safe: Callable[[IntColumn, IntColumn], BoolColumn], most: IntColumn, enough: BoolColumn) -> IntColumn:
    """The smallest amount in 1 .. `most` of each row for which `safe(rows, amounts)` holds, `most` where that is not
    `enough`. What is safe stays safe with more."""
    low: IntColumn = np.ones_like(most)
    high: IntColumn = most.copy()
    rows = np.flatnonzero(enough)
    while len(rows := rows[low[rows] < high[rows]]):
        middle = (low[rows] + high[rows]) // 2
        found = safe(rows, middle)
        high[rows[found]] = middle[found]
        low[rows[~found]] = middle[~found] + 1
    return high
