"""Splits that cannot fit in device memory for any assignment of layers to stages, judged by what their layers alone
need: the persistent model states, and the activations that every micro-batch in flight keeps.

This is a lower bound, and it is cheap: the bytes of one layer are the same for many splits, so few splits are priced
for each set of techniques. In the search for a large mixture it saves nine tenths of the pricing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn
from llmlaunch.effects.recompute import recomputed_layer
from llmlaunch.frozen import frozen
from llmlaunch.layout import RECOMPUTE_FULL, LayoutColumns
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
from llmlaunch.memory.states import states
from llmlaunch.memory.workspace import layer_backward
from llmlaunch.planner.bounds import LAYER_FIELDS
from llmlaunch.planner.search_space import TechniqueSpace
from llmlaunch.planner.setting import Setting
from llmlaunch.planner.stage_search import frequent_kind, least_layers
from llmlaunch.planner.technique_batches import apply_alike

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
