"""Training of the last layers alone, the final norm and the head."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.memory.effects import Effect
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.weights import trained_counts

__all__ = ["TrainedLayersEffect"]


class TrainedLayersEffect(Effect):
    """No backward pass runs through the layers before them (SHERL, Diao et al. 2024: late layers alone)."""

    def on(self, job: Job) -> bool:
        """Where not all layers are trained."""
        return job.techniques.trained_layers is not None

    def saved_by_groups(self, job: Job, rows: RankColumns, of_groups: Sequence[FloatColumn]) -> Sequence[FloatColumn]:
        """The trained layers' part."""
        trained = zip(of_groups, trained_counts(job, rows), rows.counts, strict=True)
        return [saved * (of_rank / np.maximum(every, 1.0)) for saved, of_rank, every in trained]

    def layer_backward(self, job: Job, rows: RankColumns, backward: FloatColumn) -> FloatColumn:
        """None runs on ranks that train no layer."""
        return np.where(reduce(np.add, trained_counts(job, rows)) > 0, backward, 0.0)
