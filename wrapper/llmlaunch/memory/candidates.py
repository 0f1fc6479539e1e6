"""Which pipeline ranks may be a layout's worst."""

from __future__ import annotations

import numpy as np

from llmlaunch.columns import IntColumn
from llmlaunch.layers.model import model_of
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.effects import Effect, effects_of
from llmlaunch.memory.job import Job, RankColumns, all_ranks, ranks_at

__all__ = ["all_are_candidates", "candidate_ranks", "stages_alike"]


def stages_alike(job: Job) -> bool:
    """Whether all pipeline ranks of even stages hold and train equally many layers of each kind."""
    return len(model_of(job.shape).decoder_kinds) == 1 and all(
        effect(job) for effect in effects_of(job, Effect.stages_alike)
    )


def all_are_candidates(job: Job, layouts: LayoutColumns) -> bool:
    """Whether any pipeline rank may be the worst of a layout, not only the first or the last.

    It may where stages differ, where inner ranks communicate with both neighbours, where prediction heads are on a
    stage before the last, where a technique leaves most there, and where matrices are packed whole into buffers whose
    padding does not grow with the rank's parameters (`layer_wise`). Otherwise no term of an inner rank exceeds that of
    the first rank.
    """
    inner = any(effect(job) for effect in effects_of(job, Effect.inner_ranks_hold_most))
    inner = inner or job.techniques.heads_before_loss or job.facts.states.matrices_whole
    return inner or not stages_alike(job) or "neighbours" in job.facts.exchange.groups or bool(np.any(layouts.uneven))


def candidate_ranks(job: Job, layouts: LayoutColumns, microbatches: IntColumn | None = None) -> RankColumns:
    """Return the pipeline ranks that can be a layout's worst.

    With even, alike stages, in-flight micro-batches fall from rank to rank and only the first and the last rank
    hold embeddings: the worst is one of those two. Otherwise every rank is a candidate (`all_are_candidates`).
    """
    if all_are_candidates(job, layouts):
        return all_ranks(job, layouts, microbatches)
    n = len(layouts)
    if not np.any(layouts.pipeline > 1):
        return ranks_at(job, layouts, np.arange(n), np.zeros(n, dtype=np.int64), microbatches, ends=True)
    index = np.concatenate([np.arange(n)] * 2)
    rank = np.concatenate([np.zeros(n, dtype=np.int64), layouts.pipeline - 1])
    return ranks_at(job, layouts, index, rank, microbatches, ends=True)
