"""Lower bounds of what a candidate costs, for many candidates at once: the seconds of a step whatever is recomputed or
offloaded and however the layers are cut, and the bytes of the model states.

To recompute a module more, or to offload one more, only costs time, so the seconds of a step without it are a bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmlaunch.backends.base import StepTechniques
from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, LayoutColumns
from llmlaunch.memory.states import least_state_bytes
from llmlaunch.planner.preference import factor_of, least_split_prices, technique_prices
from llmlaunch.planner.search_space import SPLIT_FIELDS, TechniqueSpace, recipe_with_techniques
from llmlaunch.planner.setting import Setting
from llmlaunch.recipe.types import Recipe
from llmlaunch.timing.passes import PassSeconds, pass_seconds
from llmlaunch.timing.stages import stage_seconds, stages_in_balance

__all__ = [
    "LeastFactors",
    "StepBounds",
    "by_cost",
    "least_seconds",
    "least_state_bytes_of",
    "passes_with",
    "scouts",
    "switch_sets",
]

PIECE = 8192  # layouts priced at a time, so that the columns of the formula stay in the processor's cache


def switch_sets(space: TechniqueSpace) -> list[StepTechniques]:
    """Return the different step techniques of a space without what is recomputed or offloaded."""
    return list(dict.fromkeys(step.keeping_all for step in space.step))


def least_seconds(setting: Setting, space: TechniqueSpace, splits: LayoutColumns) -> FloatColumn:
    """Return a lower bound of each split's step with any of the techniques and any cut of the layers: its stages all
    take the same time, and nothing is sent between them. Layers take as long whatever the chunks of a rank, so few
    different splits are timed."""
    names = [name for name in SPLIT_FIELDS if name != "virtual_pipeline"]
    different, row_of = splits.distinct(names)
    chunks = splits.virtual_pipeline.astype(np.float64)
    microbatches = np.maximum(splits.num_microbatches(setting.recipe.workload.global_batch_size), 1)
    least = np.full(len(splits), np.inf)
    for step in switch_sets(space):
        job = setting.job_of(recipe_with_techniques(setting.recipe, step, space.state[0]))
        stages = [
            stages_in_balance(job, layouts, stage_seconds(job, setting.cluster, layouts))
            for layouts in (different.take(slice(i, i + PIECE)) for i in range(0, len(different), PIECE))
        ]
        slowest = np.concatenate([np.zeros(0), *(piece.slowest_seconds for piece in stages)])[row_of]
        all_stages = np.concatenate([np.zeros(0), *(piece.all_seconds for piece in stages)])[row_of]
        waits = job.techniques.weight_versions == 1 and not job.techniques.zero_bubble
        bubble = (all_stages - slowest) / chunks if waits else 0.0
        least = np.minimum(least, microbatches * slowest + bubble)
    return least


def least_state_bytes_of(setting: Setting, space: TechniqueSpace, splits: LayoutColumns) -> FloatColumn:
    """Return a lower bound of the fullest rank's bytes for each set of state techniques (row) and split (column),
    whatever is recomputed or offloaded and however the layers are cut: the model states alone."""
    names = [name for name in SPLIT_FIELDS if name not in ("virtual_pipeline", "micro_batch_size", "sequence_parallel")]
    different, row_of = splits.distinct(names)
    least = np.zeros((len(space.state), len(different)))
    for row, state in zip(least, space.state, strict=True):
        job = setting.job_of(recipe_with_techniques(setting.recipe, space.step[0], state))
        layouts = different.with_techniques(state.zero_stage, 0, 0, 0)
        for start in range(0, len(different), PIECE):
            piece = slice(start, start + PIECE)
            row[piece] = least_state_bytes(job, layouts.take(piece))
    least_of_splits: FloatColumn = least[:, row_of]
    return least_of_splits


def passes_with(
    setting: Setting, space: TechniqueSpace, step: StepTechniques, splits: LayoutColumns, in_balance: bool
) -> PassSeconds:
    """Return the passes of all splits with one set of step techniques."""
    layouts = splits.with_techniques(0, step.recompute, step.recompute_layers, step.offload_layers)
    job = setting.job_of(recipe_with_techniques(setting.recipe, step, space.state[0]))
    return pass_seconds(job, setting.cluster, layouts, in_balance=in_balance)


class LeastFactors:
    """By how much more candidates count in the ranking than their step time, at least: what their split and their
    techniques cost by the preference."""

    def __init__(self, recipe: Recipe, space: TechniqueSpace, splits: LayoutColumns) -> None:
        zero = np.zeros((2, 1))
        self._split, self._step, self._state = (
            np.zeros((2, len(splits))),
            [zero] * len(space.step),
            [zero] * len(space.state),
        )
        if recipe.preference:
            self._split = least_split_prices(recipe, splits)
            self._step = [technique_prices([step]) for step in space.step]
            self._state = [technique_prices([state]) for state in space.state]

    def of_splits(self) -> FloatColumn:
        """Return the factors of all splits with the plainest techniques."""
        return factor_of(self._split)

    def of(self, rows: IntColumn, step: int, state: int | None = None) -> FloatColumn:
        """Return the factors of some splits with one set of step techniques, and with one of state techniques."""
        parts = [self._split[:, rows], self._step[step]]
        return factor_of(*parts, *([] if state is None else [self._state[state]]))


class StepBounds:
    """Lower bounds of the seconds of a step, for each split of a few and each set of step techniques. What was computed
    for one set bounds those that recompute or offload more. `in_balance`: layers may be cut anywhere."""

    def __init__(
        self, setting: Setting, space: TechniqueSpace, splits: LayoutColumns, in_balance: bool = False
    ) -> None:
        self._setting, self._space, self._splits, self._in_balance = setting, space, splits, in_balance
        # by the same techniques with nothing recomputed or offloaded
        self._seconds: dict[StepTechniques, dict[StepTechniques, FloatColumn]] = {}

    def least(self, step: StepTechniques) -> FloatColumn:
        """Return the best bound of all splits that follows from what was computed so far."""
        kept = step.keeping_all
        if kept not in self._seconds:
            passes = passes_with(self._setting, self._space, kept, self._splits, self._in_balance)
            self._seconds[kept] = {kept: passes.total}
        alike = self._seconds[kept]
        known = [seconds for other, seconds in alike.items() if other != kept and _costs_more(step, other)]
        least: FloatColumn = np.maximum.reduce([alike[kept], *known])
        return least

    def add(self, step: StepTechniques, rows: IntColumn, seconds: FloatColumn, least: FloatColumn) -> None:
        """Add the seconds of some splits; `least` are the bounds of all."""
        least[rows] = np.maximum(seconds, least[rows])
        self._seconds[step.keeping_all][step] = least


def _costs_more(step: StepTechniques, other: StepTechniques) -> bool:
    """Whether a step with `step` takes at least as long as with `other`, which has the same switches: the same but for
    modules that it recomputes or offloads too."""
    if step.solved or other.solved or step.recompute == RECOMPUTE_FULL:
        return False
    if step.offload_modules:
        alike = step.recompute == other.recompute and step.recompute_modules == other.recompute_modules
        return alike and set(other.offload_modules) < set(step.offload_modules)
    fewer = other.recompute == RECOMPUTE_SELECTIVE and set(other.recompute_modules) < set(step.recompute_modules)
    return step.recompute == RECOMPUTE_SELECTIVE and fewer and not other.offload_modules


def by_cost(space: TechniqueSpace) -> Sequence[int]:
    """Return the indices of step techniques, those that cost less than others before them, and amounts, which take many
    evaluations, last."""

    def rank(index: int) -> tuple[int, int]:
        step = space.step[index]
        parts = len(step.recompute_modules) + len(step.offload_modules)
        return (2 if step.solved else 1 if step.recompute == RECOMPUTE_FULL else 0), parts

    return sorted(range(len(space.step)), key=rank)


def scouts(space: TechniqueSpace, most: int) -> Sequence[int]:
    """Return the indices of a few step techniques that find good incumbents: those that keep all, which are fastest,
    and those that spare most, which are safe soonest."""

    def parts(index: int) -> int:
        return len(space.step[index].recompute_modules) + len(space.step[index].offload_modules)

    plain = [i for i, step in enumerate(space.step) if not step.solved]
    whole = [i for i in plain if space.step[i].recompute == RECOMPUTE_FULL]
    none = [i for i in plain if space.step[i].recompute == RECOMPUTE_NONE and not parts(i)]
    others = sorted((i for i in plain if i not in (*whole, *none)), key=lambda i: -parts(i))
    share = max(most // 3, 1)
    return [*whole[:share], *none[:share], *others[:share]]
