"""Tokens of a micro-batch on a device, and the bytes of the residual stream that they make."""

from __future__ import annotations

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.memory.answers import once_for_splits
from llmlaunch.memory.job import Job, RankColumns

STATISTIC_BYTES = 4.0  # softmax and norm statistics are fp32


@once_for_splits
def tokens(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the tokens of one micro-batch on one context-parallel rank."""
    return job.workload.sequence_length * rows.layouts.micro_batch_size / rows.layouts.context


@once_for_splits
def sequence_split(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the divisor of norms, residuals and dropout: the tensor-parallel size with sequence parallelism, else
    1."""
    return np.where(rows.layouts.sequence_parallel > 0, rows.tensor, 1.0)


@once_for_splits
def layer_input(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes of one layer's input for one micro-batch."""
    return tokens(job, rows) * job.facts.residual_bytes * job.shape.stream_width / sequence_split(job, rows)


@once_for_splits
def hidden_bytes(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes of one residual stream for one micro-batch, in the format of activations."""
    share = tokens(job, rows) / sequence_split(job, rows)
    return share * job.facts.layer.activation_bytes * job.shape.hidden_size
