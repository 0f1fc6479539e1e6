"""Training of the last layers alone, the final norm and the head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.layers.model import model_of
from llmlaunch.memory.effects import Effect
from llmlaunch.memory.job import Job, RankColumns, chunk_ranges
from llmlaunch.memory.weights import layer_parameters, linear_weights, tables
from llmlaunch.timing.effects import TimeEffect


class TrainedLayersEffect(Effect):
    """No backward pass runs through the layers before them (SHERL, Diao et al. 2024: late layers alone)."""

    def on(self, job: Job) -> bool:
        return job.techniques.trained_layers is not None

    def stages_alike(self, job: Job) -> bool:
        """Earlier stages train nothing."""
        return False

    def saved_by_groups(self, job: Job, rows: RankColumns, of_groups: Sequence[FloatColumn]) -> Sequence[FloatColumn]:
        """The trained layers' part."""
        trained = zip(of_groups, trained_counts(job, rows), rows.counts, strict=True)
        return [saved * (of_rank / np.maximum(every, 1.0)) for saved, of_rank, every in trained]

    def layer_backward(self, job: Job, rows: RankColumns, backward: FloatColumn) -> FloatColumn:
        """None runs on ranks that train no layer."""
        return np.where(reduce(np.add, trained_counts(job, rows)) > 0, backward, 0.0)

    def trains_all(self, job: Job) -> bool:
        """Earlier layers and the embedding are frozen."""
        return False

    def trained_parameters(
        self, job: Job, rows: RankColumns, dense: FloatColumn, expert: FloatColumn
    ) -> tuple[FloatColumn, FloatColumn]:
        """Those of the last layers, the final norm and the head."""
        trained = replace(rows, counts=trained_counts(job, rows))
        dense_layers, expert_layers = layer_parameters(job, rows)
        head = tables(job, rows)[1] + job.shape.hidden_size
        most = trained.sum_of(dense_layers) + np.where(rows.last, head, 0.0)
        return np.minimum(most, dense), trained.sum_of(expert_layers)

    def trained_matrices(
        self,
        job: Job,
        rows: RankColumns,
        trained: tuple[FloatColumn, FloatColumn],
        matrices: tuple[FloatColumn, FloatColumn],
    ) -> tuple[FloatColumn, FloatColumn]:
        """Those of the last layers."""
        dense, expert = linear_weights(job, rows)
        last = replace(rows, counts=trained_counts(job, rows))
        return last.sum_of(dense), last.sum_of(expert)


class TrainedLayersTime(TimeEffect):
    """Frozen layers run forward alone."""

    def on(self, job: Job) -> bool:
        return job.techniques.trained_layers is not None

    def run_backward(self, job: Job, ranks: RankColumns) -> Sequence[FloatColumn]:
        """The trained ones."""
        return trained_counts(job, ranks)


def trained_counts(job: Job, rows: RankColumns) -> tuple[FloatColumn, ...]:
    """Return the layers of each group on each row's rank that are trained."""
    last = job.techniques.trained_layers
    if last is None:
        return rows.counts
    model = model_of(job.shape)
    counts = [np.zeros(len(rows)) for _ in rows.groups]
    for start, stop in chunk_ranges(len(model.order), rows.layouts, rows.rank):
        first = np.clip(len(model.order) - last, start, stop)
        for count, kinds in zip(counts, rows.groups, strict=True):
            for kind in kinds:
                count += model.before[kind][stop] - model.before[kind][first]
    return tuple(counts)
