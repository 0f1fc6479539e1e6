"""Search the whole space of a recipe: refuse with a reason, keep the safe, rank by step time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmlaunch.backends.base import Backend
from llmlaunch.layout import LayoutColumns, Rule, Situation, refusal_counts
from llmlaunch.memory.estimator import worst_ranks
from llmlaunch.memory.job import Job
from llmlaunch.planner.enumerate import enumerate_layouts
from llmlaunch.planner.plan import Candidate, Limit
from llmlaunch.recipe.types import Recipe
from llmlaunch.timing.step import step_time

__all__ = ["Found", "search"]

MEMORY = "memory"


@dataclass(frozen=True)
class Found:
    """The legal layouts with their worst rank and step time, by column.

    `order` ranks the safe ones, fastest first, or, where none is safe, all legal ones by device bytes.
    """

    layouts: LayoutColumns
    device_bytes: NDArray[np.float64]
    worst_pipeline_rank: NDArray[np.int64]
    step_seconds: NDArray[np.float64]
    safe: NDArray[np.bool_]
    order: NDArray[np.int64]
    searched: int
    refused: Mapping[str, int]
    rules: Sequence[Rule]

    def candidate(self, recipe: Recipe, place: int) -> Candidate:
        """The layout at `place` of the ranking."""
        i = int(self.order[place])
        seconds = float(self.step_seconds[i])
        return Candidate(
            layout=self.layouts.row(i),
            device_bytes=int(self.device_bytes[i]),
            worst_pipeline_rank=int(self.worst_pipeline_rank[i]),
            step_seconds=seconds,
            tokens_per_second_per_gpu=recipe.workload.tokens_per_step / seconds / recipe.world_size,
        )


def search(recipe: Recipe, backend: Backend, job: Job, limit: Limit) -> Found:
    """Price every legal layout. Nothing is sampled: `check` and `plan` see the same space."""
    layouts = enumerate_layouts(recipe, backend.space(recipe))
    rules = backend.rules(recipe)
    situation = Situation(
        layouts, recipe.model, recipe.workload, recipe.cluster, recipe.nodes, techniques=recipe.techniques
    )
    first_failed = _first_failed(rules, situation)
    legal = layouts.take(np.flatnonzero(first_failed < 0))
    worst = worst_ranks(job, legal)
    microbatches = legal.num_microbatches(recipe.workload.global_batch_size)
    seconds = step_time(recipe.model, recipe.workload, recipe.cluster, legal, microbatches).total
    safe = worst.device_bytes <= limit.limit_bytes
    refused = dict(refusal_counts(rules, first_failed))
    if not np.all(safe):
        refused[MEMORY] = int(np.count_nonzero(~safe))
    return Found(
        layouts=legal,
        device_bytes=worst.device_bytes,
        worst_pipeline_rank=worst.pipeline_rank,
        step_seconds=seconds,
        safe=safe,
        order=_ranking(legal, worst.device_bytes, seconds, safe),
        searched=len(layouts),
        refused=refused,
        rules=rules,
    )


def _first_failed(rules: Sequence[Rule], situation: Situation) -> NDArray[np.int64]:
    """Index of the first rule each layout fails, -1 where it passes all: exactly one reason for each refusal."""
    failed = np.full(len(situation.layouts), -1, dtype=np.int64)
    for index, rule in enumerate(rules):
        failed[(failed < 0) & ~rule.allows(situation)] = index
    return failed


def _ranking(
    layouts: LayoutColumns, device: NDArray[np.float64], seconds: NDArray[np.float64], safe: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Safe layouts by step time; where none is safe, all by bytes. Equals by the smaller split, then the lower ZeRO
    stage, then the other figure, so that ties never wobble and the simpler of two equal layouts wins."""
    index = np.flatnonzero(safe)
    first, second = (seconds, device) if len(index) else (device, seconds)
    if not len(index):
        index = np.arange(len(layouts))
    split = layouts.tensor * layouts.pipeline * layouts.context * layouts.virtual_pipeline
    keys = (index, second[index], layouts.zero_stage[index], split[index], np.round(first[index], 12))
    return index[np.lexsort(keys)]
