"""Bytes and seconds of every legal split with every set of words, amounts solved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmlaunch.backends.base import HeldWords, RunningWords
from llmlaunch.layout import Layout, LayoutColumns, Rule, Situation, refusal_counts
from llmlaunch.memory.estimator import worst_ranks
from llmlaunch.memory.host import worst_hosts
from llmlaunch.memory.job import Job
from llmlaunch.planner.amounts import smallest_safe
from llmlaunch.planner.host import node_of
from llmlaunch.planner.variants import Words, every_way
from llmlaunch.recipe.types import Recipe
from llmlaunch.timing.step import step_time

if TYPE_CHECKING:
    from llmlaunch.planner.setting import Setting

__all__ = ["Points", "Rows", "first_failed", "price", "situation"]

IntColumn = NDArray[np.int64]
FloatColumn = NDArray[np.float64]


@dataclass(frozen=True)
class Rows:
    """Priced points as columns: which split, which words of each kind, the amounts, and what they come to. Bytes are
    of the worst pipeline rank's device and of a node."""

    split: IntColumn
    running: IntColumn
    held: IntColumn
    recompute_layers: IntColumn
    offload_layers: IntColumn
    device_bytes: FloatColumn
    worst_pipeline_rank: IntColumn
    host_bytes: FloatColumn
    step_seconds: FloatColumn


@dataclass(frozen=True)
class Points:
    """`rows` over the splits and the words they point to."""

    splits: LayoutColumns
    running: Sequence[RunningWords]
    held: Sequence[HeldWords]
    rows: Rows

    def __len__(self) -> int:
        return len(self.rows.split)

    def words(self, index: int) -> tuple[RunningWords, HeldWords]:
        return self.running[self.rows.running[index]], self.held[self.rows.held[index]]

    def layout(self, index: int) -> Layout:
        """One point as a layout."""
        return self.layouts_at(np.array([index])).row(0)

    @cached_property
    def layouts(self) -> LayoutColumns:
        """All points as layouts, made when first asked for."""
        return self.layouts_at(np.arange(len(self)))

    def layouts_at(self, index: IntColumn) -> LayoutColumns:
        rows = self.rows
        stages = np.array([held.zero_stage for held in self.held], dtype=np.int64)
        codes = np.array([running.recompute for running in self.running], dtype=np.int64)
        return replace(
            self.splits.take(rows.split[index]),
            zero_stage=stages[rows.held[index]],
            recompute=codes[rows.running[index]],
            recompute_layers=rows.recompute_layers[index],
            offload_layers=rows.offload_layers[index],
        )


def price(setting: Setting, splits: LayoutColumns, words: Words, rules: Sequence[Rule]) -> tuple[Points, Counter[str]]:
    """All points of the legal `splits`, and how many each of the `rules`, which look at the words, refuses."""
    blocks: list[Rows] = []
    refused: Counter[str] = Counter()
    for (i, j), said, layouts in every_way(setting.recipe, words, splits):
        failed = first_failed(rules, situation(said, layouts))
        refused.update(refusal_counts(rules, failed))
        rows = np.flatnonzero(failed < 0)
        blocks.append(_block(setting, setting.job_of(said), layouts, rows, (i, j), words.running[i].solved))
    return Points(splits, words.running, words.held, _joined(blocks)), refused


def _block(
    setting: Setting, job: Job, layouts: LayoutColumns, rows: IntColumn, words: tuple[int, int], solved: str | None
) -> Rows:
    """The points of one set of words; where an amount is solved, of the splits that need some of it."""
    chosen = layouts.take(rows)
    if solved is not None:
        needed, amount = smallest_safe(setting, job, chosen, solved)
        rows, chosen = rows[needed], chosen.take(needed).with_amount(solved, amount)
    worst = worst_ranks(job, chosen)
    recipe = setting.recipe
    return Rows(
        split=rows,
        running=np.full(len(rows), words[0]),
        held=np.full(len(rows), words[1]),
        recompute_layers=chosen.recompute_layers,
        offload_layers=chosen.offload_layers,
        device_bytes=worst.device_bytes,
        worst_pipeline_rank=worst.pipeline_rank,
        host_bytes=worst_hosts(job, chosen, node_of(recipe)),
        step_seconds=step_time(job, recipe.cluster, chosen).total,
    )


def _joined(blocks: Sequence[Rows]) -> Rows:
    return Rows(**{f.name: np.concatenate([getattr(block, f.name) for block in blocks]) for f in fields(Rows)})


def situation(recipe: Recipe, layouts: LayoutColumns) -> Situation:
    """What the rules look at."""
    return Situation(layouts, recipe.model, recipe.workload, recipe.cluster, recipe.nodes, techniques=recipe.techniques)


def first_failed(rules: Sequence[Rule], situation: Situation) -> IntColumn:
    """Index of the first rule each layout fails, -1 where it passes all: exactly one reason for each refusal."""
    failed = np.full(len(situation.layouts), -1, dtype=np.int64)
    for index, rule in enumerate(rules):
        failed[(failed < 0) & ~rule.allows(situation)] = index
    return failed
