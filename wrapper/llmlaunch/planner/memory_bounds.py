"""Lower bounds of what a candidate costs, for many candidates at once: the seconds of a step, and splits that cannot
fit in device memory for any assignment of layers to stages, judged by the least that they hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn
from llmlaunch.effects.recompute import recomputed_layer
from llmlaunch.frameworks.base import StepTechniques
from llmlaunch.frozen import frozen
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_NONE, LayoutColumns
from llmlaunch.memory.activations import kept_by_layer
from llmlaunch.memory.grouped_pricing import distinct_states
from llmlaunch.memory.job import (
    Job,
    RankColumns,
    layer_kinds,
    mixture_layers,
    of_classes,
    one_rank,
    without_layers,
)
from llmlaunch.memory.moments import state_terms
from llmlaunch.memory.peak import cache_share, outside_bytes
from llmlaunch.memory.states import least_state_bytes, states
from llmlaunch.memory.workspace import layer_backward
from llmlaunch.planner.preference import factor_of, least_split_prices, technique_prices
from llmlaunch.planner.search_space import SPLIT_FIELDS, TechniqueSpace
from llmlaunch.planner.setting import Setting
from llmlaunch.planner.stage_search import frequent_kind, fullest_stage, least_layers
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


ROUNDING = 1e-6  # terms are whole bytes, but those of a layer are not


@frozen
class LayerBytes:
    """What layers need with each of some `alike_steps` and few splits. `row_of` maps all splits in question to these
    few.

    The fields are: the bytes that one layer of each kind keeps of one micro-batch (dense and mixture x steps x splits);
    the bytes alive in addition while a layer of the more frequent kind runs backward; and the bytes left for layers on
    a rank that has one, without what is `outside` torch (steps x splits; `outside` for all splits).
    """

    job: Job
    row_of: IntColumn
    kept_bytes: FloatColumn
    beside: FloatColumn
    left: FloatColumn
    outside: FloatColumn


class MemoryBounds:
    """The splits among a few that may fit in device memory, even if tightly, with step techniques that differ in
    recompute and offload, and with any of a few sets of state techniques whose facts are equal."""

    def __init__(self, setting: Setting, space: TechniqueSpace, splits: LayoutColumns, states: Sequence[int]) -> None:
        self._setting, self._space, self._splits, self._states = setting, space, splits, states
        self._anywhere = splits.uneven & (splits.virtual_pipeline == 1)  # layers may be cut between any two ranks
        self._kind = frequent_kind(layer_kinds(setting.job.shape))
        self._rank, self._dense, self._mixture = _fewest_layers(setting.job, splits)
        self._state_bytes = _states_of_layers(setting, space, splits, self._rank, states).min(axis=0)
        self._few, self._row_of = splits.distinct(LAYER_FIELDS)

    def may_fit(self, steps: IntColumn, rows: IntColumn) -> BoolColumn:
        """Return whether each of the splits at `rows` may fit with each of some `alike_steps` (steps x rows)."""
        layers = self._layer_bytes(steps, rows)
        if layers is None:
            return np.ones((len(steps), len(rows)), dtype=np.bool_)
        few = layers.row_of[rows]
        splits, state_bytes = self._splits.take(rows), self._state_bytes[:, rows]
        layer_counts = np.array([self._dense[rows], self._mixture[rows]])
        activation_bytes = _least_kept(layers.job, splits, self._rank[rows], layer_counts, layers.kept_bytes[:, :, few])
        room = layers.left[:, few] - layers.outside[rows]
        left = room + np.where(layer_counts[self._kind] > 0, 0.0, layers.beside[:, few])
        fits: BoolColumn = (layer_counts * state_bytes).sum(axis=0) + activation_bytes <= left
        some = np.flatnonzero(self._anywhere[rows])
        of_layer = layers.kept_bytes[self._kind][:, few[some]], state_bytes[self._kind, some]
        fits[:, some] = self._ranks_hold_all(layers.job, splits.take(some), *of_layer, room[:, some])
        return fits

    def _layer_bytes(self, steps: IntColumn, rows: IntColumn) -> LayerBytes | None:
        """Return what layers of the splits at `rows` need with the steps, or None if no bound is known."""
        some, first = np.unique(self._row_of[rows]), self._space.step[int(steps[0])]
        count = len(some)
        job, layouts = apply_alike(
            self._setting,
            self._space,
            np.repeat(steps, count),
            self._states[0],
            self._few.take(np.tile(some, len(steps))),
        )
        techniques = job.techniques
        elsewhere = techniques.offload_checkpoints or techniques.swapped_share or first.offload_layers
        if first.solved is not None or elsewhere or techniques.trained_layers is not None:
            return None
        ones = np.full(len(layouts), 1.0)
        inner = replace(layouts, pipeline=np.full(len(layouts), 2))  # there is another rank for the head and the loss
        mixture, dense = self._kind * ones, (1 - self._kind) * ones
        microbatches = ones.astype(np.int64)
        one_layer = of_classes(job, inner, 0 * microbatches, microbatches, dense, mixture)
        kept_bytes, beside = np.array(kept_by_layer(job, one_layer)), layer_backward(job, one_layer)
        if techniques.recompute_method == "uniform":
            full = layouts.recompute == RECOMPUTE_FULL
            kept_bytes = np.where(full, kept_bytes / np.maximum(layouts.recompute_layers, 1), kept_bytes)
            beside = beside + recomputed_layer(job, one_layer)
        cached = job.correction.torch_factor * (1.0 + cache_share(job))
        left = self._setting.limit.most_bytes * (1.0 + ROUNDING) / cached - beside
        outside, shape = _least_outside(job, self._splits) / cached, (len(steps), count)
        place = np.zeros(len(self._few), dtype=np.int64)
        place[some] = np.arange(count)
        columns = kept_bytes.reshape(2, *shape), beside.reshape(shape), left.reshape(shape), outside
        return LayerBytes(job, place[self._row_of], *columns)

    def _ranks_hold_all(
        self,
        job: Job,
        splits: LayoutColumns,
        kept_bytes: FloatColumn,
        state_bytes: FloatColumn,
        left: FloatColumn,
    ) -> BoolColumn:
        """Return whether all ranks of each split together may hold all layers of the more frequent kind, if each rank
        is as full as possible. Splits are the last axis of the columns."""
        layers, room = np.zeros(left.shape), np.maximum(left, 0.0)
        for rank in range(int(splits.pipeline.max(initial=0))):
            each = state_bytes + _least_alive(job, splits, np.full(len(splits), rank))[0] * kept_bytes
            here = np.floor(room / np.maximum(each, 1.0))
            layers += np.where(rank < splits.pipeline, here, 0.0)
        enough: BoolColumn = layers >= layer_kinds(job.shape).count(self._kind)
        return enough


def _fewest_layers(job: Job, splits: LayoutColumns) -> tuple[IntColumn, FloatColumn, FloatColumn]:
    """Return one rank of each split, and the smallest numbers of dense and mixture layers that it can hold for any
    assignment of layers."""
    rank = np.where(splits.uneven & (splits.pipeline > 2), 1, 0)
    rows = one_rank(job, splits, rank)
    dense, mixture = _by_class(job, rows)
    code = splits.pipeline * (job.shape.num_layers + 1) + splits.virtual_pipeline
    for value in np.unique(code[splits.uneven]).tolist():
        some = np.flatnonzero(splits.uneven & (code == value))
        p, v = int(splits.pipeline[some[0]]), int(splits.virtual_pipeline[some[0]])
        fewest = least_layers(job, p, v)
        dense[some], mixture[some] = fewest[:, int(rank[some[0]])]
    return rank, dense, mixture


def _by_class(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the numbers of dense and mixture layers on each rank (2 x rows)."""
    mixtures = mixture_layers(job, rows)
    return np.array([rows.layers - mixtures, mixtures])


def _states_of_layers(
    setting: Setting, space: TechniqueSpace, splits: LayoutColumns, rank: IntColumn, states: Sequence[int]
) -> FloatColumn:
    """Return the bytes of persistent model states of one layer of each kind, with each of the state techniques (states
    x dense and mixture x splits).

    It is what one more layer adds to a rank that holds all of them, because only some of the gathered parameters are
    alive at a time, and more of the first layers than of the last.
    """
    distinct, row_of = distinct_states(setting.job, splits)
    at = np.zeros(len(distinct), dtype=np.int64)
    at[row_of] = rank
    bytes_of = np.zeros((len(states), 2, len(distinct)))
    for place, state in enumerate(space.state[index] for index in states):
        job = setting.job_with(space.step[0], state)
        layouts = distinct.with_techniques(state.zero_stage, RECOMPUTE_FULL, 0, 0)  # gathers least
        bytes_of[place] = _of_one_more(job, one_rank(job, layouts, at))
    of_splits: FloatColumn = bytes_of[:, :, row_of]
    return of_splits


def _of_one_more(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes, alive at the loss of the last micro-batch, that one more layer of each kind adds to a rank with
    all layers (dense and mixture x rows)."""
    count, most = len(rows), float(job.shape.num_layers)
    dense, mixture = np.repeat([[most + 1.0, most, 0.0, 0.0], [0.0, 0.0, most + 1.0, most]], count, axis=1)
    index = np.tile(np.arange(count), 4)
    holding = of_classes(job, rows.layouts.take(index), rows.rank[index], rows.microbatches[index], dense, mixture)
    terms = state_terms(job, holding, states(job, holding))
    names = ("parameters", "weight_copies", "optimizer_states")
    total = terms.moments[0]["gradients"] + sum(terms.lasting[name] for name in names)
    of_kinds: FloatColumn = total.reshape(2, 2, count)
    return of_kinds[:, 0] - of_kinds[:, 1]


def _least_outside(job: Job, splits: LayoutColumns) -> FloatColumn:
    """Return the bytes outside torch on the rank of each split that has the least of them: the first, a middle one, or
    the last."""
    rows = without_layers(job, splits)
    ranks = (rows.rank, np.minimum(1, splits.pipeline - 1), splits.pipeline - 1)
    least: FloatColumn = np.min([outside_bytes(job, replace(rows, rank=rank)) for rank in ranks], axis=0)
    return least


def _least_kept(
    job: Job, layouts: LayoutColumns, rank: IntColumn, layer_counts: FloatColumn, kept_bytes: FloatColumn
) -> FloatColumn:
    """Return a lower bound on the activation bytes that a pipeline rank of each layout keeps at its peak for its layers
    (`layer_counts`, dense and mixture x layouts), each of which keeps `kept_bytes` (kinds x ...)."""
    turns, more = _least_alive(job, layouts, rank)
    least: FloatColumn = turns * np.einsum("kn,k...n->...n", layer_counts, kept_bytes)
    if np.any(more):
        lighter = np.where(
            layer_counts[1] > 0, np.where(layer_counts[0] > 0, kept_bytes.min(axis=0), kept_bytes[1]), kept_bytes[0]
        )
        least = least + more * layer_counts.sum(axis=0) * lighter
    return least


def _least_alive(job: Job, layouts: LayoutColumns, rank: IntColumn) -> tuple[IntColumn, FloatColumn]:
    """Return two lower bounds for a pipeline rank of each layout at its peak.

    The first is the number of micro-batches of which it keeps all its chunks alive: those in flight
    (memory/schedule.py) that have passed every chunk. The second is how many times its layers are alive in addition, if
    its chunks have equally many layers.
    """
    p, v = layouts.pipeline, layouts.virtual_pipeline
    m = np.maximum(layouts.num_microbatches(job.workload.global_batch_size), 1)
    group = p if job.microbatch_group is None else job.microbatch_group
    chunks = 2 * (p - rank - 1) + (v - 1) * group + 1
    turns = np.where(chunks >= m * v, m, np.minimum(group * (chunks // (group * v)), m))
    alive: IntColumn = np.where(v > 1, turns, np.minimum(m, p - rank))
    equal = (v > 1) & (~layouts.uneven | ((rank > 0) & (rank < p - 1)))
    return alive, np.where(equal, np.minimum(chunks, m * v) / v - turns, 0.0)
