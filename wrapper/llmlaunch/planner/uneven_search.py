"""Splits whose stages are not even: solved for each that can still be among the first.

A step takes at least as long as with stages in perfect balance. Where even that is longer than what is safe already,
the split is not opened: it is outpaced. So the first of the ranking are exact, and most splits cost a comparison.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from llmlaunch.backends.base import StepTechniques
from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.layout import LayoutColumns, Rule, refusal_counts
from llmlaunch.memory.floor import least_bytes
from llmlaunch.memory.halves import distinct_held
from llmlaunch.planner.points import Rows
from llmlaunch.planner.pricing import (
    TechniqueBatch,
    first_failed,
    group_equal,
    is_safe,
    situation,
    state_batch,
    state_job,
    state_update,
)
from llmlaunch.planner.search_space import TechniqueSpace, apply_techniques, recipe_with_techniques
from llmlaunch.planner.setting import Setting
from llmlaunch.planner.stage_search import balanced, balanced_within, costs_of
from llmlaunch.timing.running import running

__all__ = ["Opened", "open_uneven"]

AT_ONCE = 2048  # splits opened together, those with the shortest steps first; the next ones may be outpaced by then


@dataclass
class Opened:
    """Points of uneven splits, each block over splits of its own, and what became of the others: how many each rule
    refuses, how many fit in no way, how many were outpaced. `fast` are the step times of the fastest safe layouts, as
    many as are exact."""

    fast: FloatColumn
    splits: list[LayoutColumns] = field(default_factory=list)
    blocks: list[Rows] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    overfull: int = 0
    outpaced: int = 0

    @property
    def to_beat(self) -> float:
        """Seconds a step must be shorter than."""
        return float(self.fast.max())

    def add(self, splits: LayoutColumns, rows: Rows, safe: NDArray[np.bool_]) -> None:
        self.splits.append(splits)
        self.blocks.append(rows)
        self.fast = np.sort(np.concatenate([self.fast, rows.step_seconds[safe]]))[: len(self.fast)]


def open_uneven(
    setting: Setting, splits: LayoutColumns, words: TechniqueSpace, rules: Sequence[Rule], fast: FloatColumn
) -> Opened:
    """Of the legal uneven `splits`, each with all words that have no amount to solve. `fast`: see `Opened`, infinite
    where there are fewer. Where the best balance is not safe, the best that memory allows takes its place."""
    opened = Opened(fast)
    ways = len(words.without_amounts) * len(words.held)
    worth = _least(setting, StepTechniques(), words, splits) < opened.to_beat  # nothing takes time away
    opened.outpaced += ways * int(np.count_nonzero(~worth))
    splits = splits.take(np.flatnonzero(worth))
    room = _with_room(setting, words, splits)
    for places in group_equal(setting, words):
        for i in words.without_amounts:
            passed = np.array([_allowed(setting, words, (i, j), splits, rules, opened) for j in places])
            allowed = passed & room[places]
            opened.overfull += int(np.count_nonzero(passed & ~allowed))
            rows = np.flatnonzero(allowed.any(axis=0))
            batches = _batches(setting, words, (i, places[0]), splits.take(rows), opened)
            priced = sum(
                _open(setting, words, (i, places), batch, allowed[:, rows[which]], opened) for batch, which in batches
            )
            opened.outpaced += int(np.count_nonzero(allowed)) - priced
    return opened


def _with_room(setting: Setting, words: TechniqueSpace, splits: LayoutColumns) -> NDArray[np.bool_]:
    """Which splits (column) could fit with which held words (row), before their layers are cut."""
    few, held_of = distinct_held(setting.job, splits)
    least = [
        least_bytes(state_job(setting, words, place), few.with_techniques(held.zero_stage, 0, 0, 0))[held_of]
        for place, held in enumerate(words.held)
    ]
    room: NDArray[np.bool_] = np.array(least) <= setting.limit.limit_bytes
    return room


def _allowed(
    setting: Setting,
    words: TechniqueSpace,
    places: tuple[int, int],
    splits: LayoutColumns,
    rules: Sequence[Rule],
    opened: Opened,
) -> NDArray[np.bool_]:
    """What the rules that look at words let pass; the others are counted."""
    failed = first_failed(rules, situation(*apply_techniques(setting.recipe, words, places, splits)))
    opened.refused.update(refusal_counts(rules, failed))
    passed: NDArray[np.bool_] = failed < 0
    return passed


def _least(setting: Setting, way: StepTechniques, words: TechniqueSpace, splits: LayoutColumns) -> FloatColumn:
    """Seconds no stages go below."""
    recipe = setting.recipe
    layouts = splits.with_techniques(0, way.recompute, way.recompute_layers, way.offload_layers)
    job = setting.job_of(recipe_with_techniques(recipe, way, words.held[0]))
    return running(job, setting.cluster, layouts, in_balance=True).total


def _batches(
    setting: Setting, words: TechniqueSpace, places: tuple[int, int], splits: LayoutColumns, opened: Opened
) -> Iterator[tuple[LayoutColumns, IntColumn]]:
    """The splits that are not outpaced, those with the shortest steps first, as the best balance cuts their layers, and
    which of the splits they are."""
    said, layouts = apply_techniques(setting.recipe, words, places, splits)
    job = setting.job_of(said)
    cluster = setting.cluster
    costs, least = costs_of(job, cluster, layouts), _least(setting, words.running[places[0]], words, splits)
    waiting = np.argsort(least, kind="stable")
    while len(waiting := waiting[least[waiting] < opened.to_beat]):
        now, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
        cut = balanced(job, layouts.take(now), costs.take(now))
        worth = cut.uneven & (running(job, cluster, cut).total < opened.to_beat)  # even ones are searched as such
        yield cut.take(worth), now[worth]


def _open(
    setting: Setting,
    words: TechniqueSpace,
    places: tuple[int, Sequence[int]],
    splits: LayoutColumns,
    allowed: NDArray[np.bool_],
    opened: Opened,
) -> int:
    """Prices those that are fast enough with their update, with each of the held words that are `allowed` (held words x
    splits); how many points that are. The time comes first: it is had for less than the memory of all ranks."""
    if not len(splits):
        return 0
    i, held_places = places
    way, few = _way(setting, words, (i, held_places[0]), splits)
    priced = 0
    for place, mine in zip(held_places, allowed, strict=True):
        seconds = way.seconds_with(state_update(setting, words, place, few))
        near = np.flatnonzero(mine & (seconds < opened.to_beat))
        priced += len(near)
        if len(near):
            rows = way.take(near).priced_at(state_batch(setting, words, place, few), seconds[near])
            _add(setting, words, (i, place), splits.take(near), rows, opened)
    return priced


def _add(
    setting: Setting, words: TechniqueSpace, places: tuple[int, int], splits: LayoutColumns, rows: Rows, opened: Opened
) -> None:
    """The rows, in the place of those that are not safe the best that memory allows."""
    safe = is_safe(setting, rows.device_bytes, rows.host_bytes)
    again = np.flatnonzero(~safe)
    kept = np.ones(len(rows), dtype=np.bool_)
    if len(again):
        kept[again[_fit(setting, words, places, splits.take(again), opened)]] = False
    opened.add(splits.take(kept), replace(rows.take(kept), split=np.arange(np.count_nonzero(kept))), safe[kept])


def _fit(
    setting: Setting, words: TechniqueSpace, places: tuple[int, int], splits: LayoutColumns, opened: Opened
) -> IntColumn:
    """Adds the best that memory allows of `splits`; which of them have such stages."""
    said, layouts = apply_techniques(setting.recipe, words, places, splits)
    job = setting.job_of(said)
    costs = costs_of(job, setting.cluster, layouts)
    fitting, cut = balanced_within(job, layouts, costs, setting.limit.limit_bytes)
    if len(fitting):
        way, few = _way(setting, words, places, cut)
        rows = way.priced_with(state_batch(setting, words, places[1], few))
        opened.add(cut, rows, is_safe(setting, rows.device_bytes, rows.host_bytes))
    return fitting


def _way(
    setting: Setting, words: TechniqueSpace, places: tuple[int, int], splits: LayoutColumns
) -> tuple[TechniqueBatch, LayoutColumns]:
    """The splits with the words at `places`, and the few that differ in what is held."""
    said, layouts = apply_techniques(setting.recipe, words, places, splits)
    job = setting.job_of(said)
    few, held_of = distinct_held(job, layouts)
    return TechniqueBatch(setting, job, places[0], np.arange(len(layouts)), layouts, held_of), few
