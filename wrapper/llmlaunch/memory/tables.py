"""Gradients of embedding tables on their way to the gradient buffer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmlaunch.columns import FloatColumn
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.weights import vocabulary

__all__ = ["table_gradient", "table_sum", "waiting_table"]


def table_gradient(job: Job, rows: RankColumns) -> FloatColumn:
    """Bytes of the gradient of an embedding table. Without a table to train, nothing."""
    if job.techniques.adapters is not None or job.techniques.trained_layers is not None or job.facts.full_sharding:
        return np.zeros(len(rows))
    return np.asarray(vocabulary(job, rows) / rows.tensor * job.shape.hidden_size * job.facts.parameter_bytes)


def waiting_table(job: Job, rows: RankColumns) -> FloatColumn:
    """Without a pipeline prediction heads and a tied head use the decoder's own table: autograd keeps the gradient they
    make of it until the decoder's tokens have made theirs, and adds that to it in place
    (torch/csrc/autograd/input_buffer.cpp, 2.13; under fake tensors the sum is a third one). A tied head that
    accumulates in place gives a stub, which takes nothing more."""
    if not (job.shape.mtp_num_layers or (job.shape.tied_embeddings and not _stub(job))):
        return np.zeros(len(rows))
    return np.where(_apart(job, rows), table_gradient(job, rows), 0.0)


def table_sum(job: Job, rows: RankColumns) -> FloatColumn:
    """What is beside the gradient of the decoder's tokens: the one that waited, or the sum of both where a stub did,
    which others use as well."""
    if not (job.shape.mtp_num_layers or job.shape.tied_embeddings):
        return np.zeros(len(rows))
    return np.where(_apart(job, rows), table_gradient(job, rows), 0.0)


def _apart(job: Job, rows: RankColumns) -> NDArray[np.bool_]:
    """Without a pipeline; but where gradients are made anew in every step, of its only micro-batch the one that waits
    becomes the parameter's own, which is counted as such."""
    alone: NDArray[np.bool_] = rows.first & rows.last
    return alone & (rows.microbatches > 1) if job.facts.gradients_freed else alone


def _stub(job: Job) -> bool:
    return job.facts.weight_gradient_fused and job.facts.weight_gradient_stubs
