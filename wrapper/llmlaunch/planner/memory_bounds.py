"""Splits that cannot fit device memory however their layers are cut, by what their layers alone take: the model states
that last, and the activations that every micro-batch in flight keeps.

It is a bound, and it costs little: bytes of one layer are the same for many splits, so few are priced for each set of
techniques. In the search of a large mixture it spares nine tenths of the pricing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn
from llmlaunch.layout import RECOMPUTE_FULL, LayoutColumns
from llmlaunch.memory.activations import kept_by_layer
from llmlaunch.memory.grouped_pricing import distinct_states
from llmlaunch.memory.job import Job, RankColumns, layer_kinds, one_rank, without_layers
from llmlaunch.memory.moments import state_terms
from llmlaunch.memory.states import states
from llmlaunch.planner.search_space import TechniqueSpace, apply_alike, recipe_with_techniques
from llmlaunch.planner.setting import Setting
from llmlaunch.planner.stage_search import least_layers

__all__ = ["MemoryBounds"]

LAYER_FIELDS = ("tensor", "context", "expert", "expert_tensor", "micro_batch_size", "sequence_parallel")
ROUNDING = 1e-6  # terms are whole bytes, and a layer's are not


class MemoryBounds:
    """The splits of a few that may fit device memory, tightly even, with step techniques that differ in recompute and
    offload, and any of a few sets of state techniques, whose facts are equal."""

    def __init__(self, setting: Setting, space: TechniqueSpace, splits: LayoutColumns, states: Sequence[int]) -> None:
        self._setting, self._space, self._splits, self._state = setting, space, splits, states[0]
        self._anywhere = splits.uneven & (splits.virtual_pipeline == 1)  # layers may be cut between any two ranks
        self._rank, self._dense, self._mixture = _fewest_layers(setting.job, splits)
        self._state_bytes = _least_states(setting, space, splits, self._rank, states)
        self._few, self._row_of = splits.distinct(LAYER_FIELDS)

    def may_fit(self, steps: IntColumn, rows: IntColumn) -> BoolColumn:
        """Whether each of the splits at `rows` may fit with each of some `alike_steps` (steps x rows)."""
        job, layer_bytes = self._layer_bytes(steps)
        first, techniques = self._space.step[int(steps[0])], job.techniques
        elsewhere = techniques.offload_checkpoints or techniques.swapped_share or first.offload_layers
        if first.solved is not None or elsewhere or techniques.trained_layers is not None:
            return np.ones((len(steps), len(rows)), dtype=np.bool_)
        outside = max(job.facts.context_bytes + job.correction.outside_bytes, 0.0)
        most = (self._setting.limit.most_bytes - outside) / job.correction.torch_factor * (1.0 + ROUNDING)
        alive = _least_alive(job, self._splits.take(rows), self._rank[rows])
        dense, mixture = self._state_bytes[:, None, rows] + alive * layer_bytes[:, :, self._row_of[rows]]
        fits: BoolColumn = self._dense[rows] * dense + self._mixture[rows] * mixture <= most
        some = np.flatnonzero(self._anywhere[rows])
        fits[:, some] = self._ranks_hold_all(job, rows[some], layer_bytes, most)
        return fits

    def _layer_bytes(self, steps: IntColumn) -> tuple[Job, FloatColumn]:
        """Return the job of the steps, and the bytes that one layer of each kind keeps of one micro-batch with each of
        them (dense and mixture x steps x few splits)."""
        count = len(self._few)
        recipe, layouts = apply_alike(
            self._setting.recipe,
            self._space,
            np.repeat(steps, count),
            self._state,
            self._few.take(np.tile(np.arange(count), len(steps))),
        )
        job = self._setting.job_of(recipe)
        layer_bytes = np.array(kept_by_layer(job, without_layers(layouts)))
        if job.techniques.recompute_method == "uniform":
            full = layouts.recompute == RECOMPUTE_FULL
            layer_bytes = np.where(full, layer_bytes / np.maximum(layouts.recompute_layers, 1), layer_bytes)
        return job, layer_bytes.reshape(2, len(steps), count)

    def _ranks_hold_all(self, job: Job, some: IntColumn, layer_bytes: FloatColumn, most: float) -> BoolColumn:
        """Whether all ranks together may hold all layers of the more frequent kind, if each is as full as can be (steps
        x some splits)."""
        kinds = layer_kinds(job.shape)
        mixtures = sum(kinds)
        kind, layers = (1, mixtures) if 2 * mixtures > len(kinds) else (0, len(kinds) - mixtures)
        splits = self._splits.take(some)
        room = np.zeros((layer_bytes.shape[1], len(some)))
        for rank in range(int(splits.pipeline.max(initial=0))):
            alive = _least_alive(job, splits, np.full(len(some), rank))
            each = self._state_bytes[kind, some] + alive * layer_bytes[kind][:, self._row_of[some]]
            room += np.where(rank < splits.pipeline, most / np.maximum(each, 1.0), 0.0)
        enough: BoolColumn = room * (1.0 + ROUNDING) >= layers
        return enough


def _fewest_layers(job: Job, splits: LayoutColumns) -> tuple[IntColumn, FloatColumn, FloatColumn]:
    """Return one rank of each split, and the fewest dense and mixture layers that it holds however the split is cut."""
    rank = np.where(splits.uneven & (splits.pipeline > 2), 1, 0)
    rows = one_rank(job, splits, rank)
    dense, mixture = rows.dense_layers.copy(), rows.moe_layers.copy()
    code = splits.pipeline * (job.shape.num_layers + 1) + splits.virtual_pipeline
    for value in np.unique(code[splits.uneven]).tolist():
        some = np.flatnonzero(splits.uneven & (code == value))
        p, v = int(splits.pipeline[some[0]]), int(splits.virtual_pipeline[some[0]])
        fewest = least_layers(layer_kinds(job.shape), p, v)
        dense[some], mixture[some] = fewest[:, int(rank[some[0]])]
    return rank, dense, mixture


def _least_states(
    setting: Setting, space: TechniqueSpace, splits: LayoutColumns, rank: IntColumn, states: Sequence[int]
) -> FloatColumn:
    """Return the bytes of model states that last, of one layer of each kind with the state techniques that leave least
    of them (dense and mixture x splits): what one layer more adds to a rank that holds all of them, since of gathered
    parameters some are alive at a time, and of the first layers more than of the last."""
    distinct, row_of = distinct_states(setting.job, splits)
    at = np.zeros(len(distinct), dtype=np.int64)
    at[row_of] = rank
    least = np.full((2, len(distinct)), np.inf)
    for state in (space.state[index] for index in states):
        job = setting.job_of(recipe_with_techniques(setting.recipe, space.step[0], state))
        layouts = distinct.with_techniques(state.zero_stage, RECOMPUTE_FULL, 0, 0)  # gathers least
        rows = one_rank(job, layouts, at)
        kinds, most = (np.array([1, 0]), np.array([0, 1])), job.shape.num_layers
        more = [_lasting(job, rows, *(most + 1) * kind) - _lasting(job, rows, *most * kind) for kind in kinds]
        least = np.minimum(least, more)
    least_of_splits: FloatColumn = least[:, row_of]
    return least_of_splits


def _lasting(job: Job, rows: RankColumns, dense_layers: int, mixture_layers: int) -> FloatColumn:
    """Return the bytes that grow with the layers of a rank, alive at the loss of the last micro-batch."""
    dense, mixture = (np.full(len(rows), float(layers)) for layers in (dense_layers, mixture_layers))
    holding = RankColumns(rows.layouts, rows.layout_index, rows.rank, rows.microbatches, dense, mixture)
    terms = state_terms(job, holding, states(job, holding))
    total: FloatColumn = terms.moments[0]["gradients"] + sum(
        terms.lasting[name] for name in ("parameters", "weight_copies", "optimizer_states")
    )
    return total


def _least_alive(job: Job, layouts: LayoutColumns, rank: IntColumn) -> IntColumn:
    """Return of how many micro-batches a pipeline rank of each layout keeps all its chunks alive at its peak, at least:
    of those in flight (memory/schedule.py), the ones that have passed every chunk."""
    p, v = layouts.pipeline, layouts.virtual_pipeline
    m = np.maximum(layouts.num_microbatches(job.workload.global_batch_size), 1)
    more = int(job.techniques.overlaps_experts)
    group = p if job.microbatch_group is None else job.microbatch_group
    chunks = 2 * (p - rank - 1) + (v - 1) * group + 1 + more
    turns = np.where(chunks >= m * v, m, np.minimum(group * (chunks // (group * v)), m))
    alive: IntColumn = np.where(v > 1, turns, np.minimum(m, p - rank + more))
    return alive
