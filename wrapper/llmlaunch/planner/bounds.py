"""Lower bounds of what a candidate costs, for many candidates at once: the seconds of a step whatever is recomputed or
offloaded and however the layers are cut, and the bytes of the model states.

To recompute a module more, or to offload one more, only costs time, so the seconds of a step without it are a bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.frameworks.base import StepTechniques
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_NONE, LayoutColumns
from llmlaunch.memory.job import Job
from llmlaunch.memory.states import least_state_bytes
from llmlaunch.planner.preference import factor_of, least_split_prices, technique_prices
from llmlaunch.planner.search_space import SPLIT_FIELDS, TechniqueSpace
from llmlaunch.planner.setting import Setting
from llmlaunch.planner.stage_search import fullest_stage
from llmlaunch.planner.technique_batches import apply_alike
from llmlaunch.recipe.types import Recipe
from llmlaunch.timing.passes import (
    PassSeconds,
    fills_and_drains,
    pass_seconds,
    passes_in_balance,
    straggler_share,
)
from llmlaunch.timing.products import split_of
from llmlaunch.timing.stages import Pieces, pieces, stages_in_balance

# what a layer's seconds and activations depend on, of a split
LAYER_FIELDS = ("tensor", "context", "expert", "expert_tensor", "micro_batch_size", "sequence_parallel")
PIECE = 8192  # layouts priced at a time, so that the columns of the formula stay in the processor's cache


def switch_sets(space: TechniqueSpace) -> list[StepTechniques]:
    """Return the different step techniques of a space without what is recomputed or offloaded."""
    return list(dict.fromkeys(step.keeping_all for step in space.step))


class LeastSeconds:
    """Lower bounds of a step of each split with any cut of the search, whatever is recomputed or offloaded. Layers take
    as long in all splits that agree in LAYER_FIELDS, so few are timed, once with each set of switches."""

    def __init__(self, setting: Setting, space: TechniqueSpace, splits: LayoutColumns) -> None:
        self._setting, self._splits = setting, splits
        self._few, self._few_of = splits.distinct(LAYER_FIELDS)
        self._parts: dict[StepTechniques, tuple[Job, Pieces]] = {}
        for step in switch_sets(space):
            job = setting.job_with(step, space.state[0])
            self._parts[step] = job, pieces(job, setting.cluster, split_of(job, self._few))

    def of_any(self, rows: IntColumn) -> FloatColumn:
        """Return the bounds of some splits with any of the switches: their stages all take the same time but for one
        that holds more, and nothing is sent between them."""
        setting, splits = self._setting, self._splits.take(rows)
        fullest, few_of = fullest_stage(setting.job, splits), self._few_of[rows]
        chunks = splits.virtual_pipeline.astype(np.float64)
        microbatches = np.maximum(splits.num_microbatches(setting.recipe.workload.global_batch_size), 1)
        least = np.full(len(splits), np.inf)
        for job, parts in self._parts.values():
            stages = stages_in_balance(job, splits, parts.seconds.take(few_of), fullest)
            others = np.maximum(stages.all_seconds - stages.slowest_seconds, 0.0)
            bubble = others / chunks if fills_and_drains(job) else 0.0
            least = np.minimum(least, microbatches * stages.slowest_seconds + bubble)
        return least * (1.0 + straggler_share(np.float64(setting.recipe.world_size)))

    def keeping(self, step: StepTechniques, rows: IntColumn) -> FloatColumn:
        """Return the bounds of some splits with one set of switches, what is sent between their stages included."""
        job, parts = self._parts[step]
        splits, few_of = self._splits.take(rows), self._few_of[rows]
        fullest = fullest_stage(job, splits)
        return passes_in_balance(job, self._setting.cluster, splits, self._few, few_of, parts, fullest)

    def with_steps(self, space: TechniqueSpace, steps: IntColumn, state: int, rows: IntColumn) -> FloatColumn:
        """Return the bounds of some splits with step techniques each, all of one group of `alike_steps`, with all that
        is recomputed and offloaded."""
        setting, count = self._setting, len(self._few)
        different, few_of = np.unique(steps * count + self._few_of[rows], return_inverse=True)
        step, place = np.divmod(different, count)
        job, few = apply_alike(setting, space, step, state, self._few.take(place))
        splits = self._splits.take(rows)
        if np.any(few.recompute_layers):  # of each chunk, and these have few layers or many
            few, few_of = apply_alike(setting, space, steps, state, splits)[1], np.arange(len(rows))
        parts = pieces(job, setting.cluster, split_of(job, few))
        return passes_in_balance(job, setting.cluster, splits, few, few_of, parts, fullest_stage(job, splits))


def least_state_bytes_of(setting: Setting, space: TechniqueSpace, splits: LayoutColumns) -> FloatColumn:
    """Return a lower bound of the fullest rank's bytes for each set of state techniques (row) and split (column),
    whatever is recomputed or offloaded and however the layers are cut: the model states alone."""
    names = [name for name in SPLIT_FIELDS if name not in ("virtual_pipeline", "micro_batch_size", "sequence_parallel")]
    different, row_of = splits.distinct(names)
    least = np.zeros((len(space.state), len(different)))
    for row, state in zip(least, space.state, strict=True):
        job = setting.job_with(space.step[0], state)
        layouts = different.with_techniques(state.zero_stage, 0, 0, 0)
        for start in range(0, len(different), PIECE):
            piece = slice(start, start + PIECE)
            row[piece] = least_state_bytes(job, layouts.take(piece))
    least_of_splits: FloatColumn = least[:, row_of]
    return least_of_splits


def passes_with(setting: Setting, space: TechniqueSpace, step: StepTechniques, splits: LayoutColumns) -> PassSeconds:
    """Return the passes of all splits with one set of step techniques."""
    layouts = splits.with_techniques(0, step.recompute, step.recompute_layers, step.offload_layers)
    job = setting.job_with(step, space.state[0])
    return pass_seconds(job, setting.cluster, layouts)


class LeastFactors:
    """By how much more candidates count in the ranking than their step time, at least: what their split and their
    techniques cost by the preference."""

    def __init__(self, recipe: Recipe, space: TechniqueSpace, splits: LayoutColumns) -> None:
        counts = (len(splits), len(space.step), len(space.state))
        self._split, self._step, self._state = (np.zeros((2, count)) for count in counts)
        if recipe.preference:
            self._split = least_split_prices(recipe, splits)
            self._step, self._state = technique_prices(space.step), technique_prices(space.state)

    def of_splits(self) -> FloatColumn:
        """Return the factors of all splits with the plainest techniques."""
        return factor_of(self._split)

    def of(self, rows: IntColumn, step: int | IntColumn, state: int | None = None) -> FloatColumn:
        """Return the factors of some splits with one set of step techniques, or with one each, and with one of state
        techniques."""
        parts = [self._split[:, rows], self._step[:, np.atleast_1d(step)]]
        return factor_of(*parts, *([] if state is None else [self._state[:, state : state + 1]]))

    def of_steps(self, rows: IntColumn, steps: IntColumn) -> FloatColumn:
        """Return the factors of some splits with each of some sets of step techniques (steps x rows)."""
        return factor_of(self._split[:, None, rows], self._step[:, steps, None])


def by_cost(space: TechniqueSpace) -> Sequence[int]:
    """Return the indices of step techniques, those that cost less than others before them, and amounts, which take many
    evaluations, last."""

    def rank(index: int) -> tuple[int, int]:
        step = space.step[index]
        parts = len(step.recompute_modules) + len(step.offload_modules)
        return (2 if step.solved else 1 if step.recompute == RECOMPUTE_FULL else 0), parts

    return sorted(range(len(space.step)), key=rank)


def scouts(space: TechniqueSpace, steps: Iterable[int], most: int) -> Sequence[int]:
    """Return a few of the `steps`, indices of step techniques, that find good incumbents: those that keep all, which
    are fastest, and those that spare most, which are safe soonest."""

    def parts(index: int) -> int:
        return len(space.step[index].recompute_modules) + len(space.step[index].offload_modules)

    plain = [i for i in sorted(steps) if not space.step[i].solved]
    whole = [i for i in plain if space.step[i].recompute == RECOMPUTE_FULL]
    none = [i for i in plain if space.step[i].recompute == RECOMPUTE_NONE and not parts(i)]
    others = sorted((i for i in plain if i not in (*whole, *none)), key=lambda i: -parts(i))
    share = max(most // 3, 1)
    return [*whole[:share], *none[:share], *others[:share]]
