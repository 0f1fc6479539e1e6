"""Search the whole space of a recipe: refuse with a reason, keep the safe, rank by step time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmlaunch.backends.base import Backend
from llmlaunch.layout import LayoutColumns, Rule, Situation, refusal_counts
from llmlaunch.memory.estimator import worst_ranks
from llmlaunch.memory.host import worst_hosts
from llmlaunch.memory.job import Job
from llmlaunch.planner.enumerate import enumerate_layouts
from llmlaunch.planner.host import host_limit, node_of
from llmlaunch.planner.plan import Candidate, Limit
from llmlaunch.recipe.types import Recipe
from llmlaunch.timing.step import step_time

__all__ = ["Found", "search"]

MEMORY = "memory"
HOST_MEMORY = "host_memory"  # fits the devices, not the node


@dataclass(frozen=True)
class Found:
    """The legal layouts with their worst rank and step time, by column.

    `order` ranks the safe ones, fastest first, or, where none is safe, all legal ones by how full they
    make the fullest memory, of a device or of a node.
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
            techniques=recipe.techniques,
            gradient_dtype=recipe.training.gradient_dtype,
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
    seconds = step_time(job, recipe.cluster, legal).total
    fits = worst.device_bytes <= limit.limit_bytes
    host, most = worst_hosts(job, legal, node_of(recipe)), host_limit(recipe).limit_bytes
    safe = fits & (host <= most)
    counts = {MEMORY: np.count_nonzero(~fits), HOST_MEMORY: np.count_nonzero(fits & ~safe)}
    refused = {**refusal_counts(rules, first_failed), **{key: int(n) for key, n in counts.items() if n}}
    filled = np.maximum(worst.device_bytes / max(limit.limit_bytes, 1), host / max(most, 1))
    return Found(
        layouts=legal,
        device_bytes=worst.device_bytes,
        worst_pipeline_rank=worst.pipeline_rank,
        step_seconds=seconds,
        safe=safe,
        order=_ranking(legal, filled, seconds, safe),
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
    layouts: LayoutColumns, filled: NDArray[np.float64], seconds: NDArray[np.float64], safe: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Safe layouts by step time; where none is safe, all by how full the fullest memory is. Equals by the smaller
    split, then the lower ZeRO stage, then the other figure, so that ties never wobble and the simpler of two equal
    layouts wins."""
    index = np.flatnonzero(safe)
    first, second = (seconds, filled) if len(index) else (filled, seconds)
    if not len(index):
        index = np.arange(len(layouts))
    split = layouts.tensor * layouts.pipeline * layouts.context * layouts.virtual_pipeline
    keys = (index, second[index], layouts.zero_stage[index], split[index], np.round(first[index], 12))
    return index[np.lexsort(keys)]
