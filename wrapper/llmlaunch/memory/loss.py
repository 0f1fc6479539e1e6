"""The logits and the loss on the last pipeline rank."""

from __future__ import annotations

import numpy as np

from llmlaunch.memory.job import FloatColumn, Job, RankColumns
from llmlaunch.memory.saved import STATISTIC_BYTES, sequence_split, tokens
from llmlaunch.memory.weights import vocabulary

__all__ = ["cached_logits", "final_norm", "logits", "step_logits"]


def final_norm(job: Job, rows: RankColumns) -> FloatColumn:
    """Last rank: the norm before the head keeps its input and output, the output gathered where linears save that."""
    facts, h, split = job.facts, job.shape.hidden_size, sequence_split(rows)
    per_token = (2.0 * facts.activation_bytes + facts.norm_extra_bytes) * h + STATISTIC_BYTES
    more = facts.activation_bytes * h * (split - 1.0) if facts.gathered_inputs_kept else 0.0
    kept = tokens(job, rows) * (per_token + more) / split * (1 + job.shape.mtp_num_layers)
    return np.where(rows.last, kept, 0.0)


def logits(job: Job, rows: RankColumns) -> FloatColumn:
    """Last rank: the logits and whatever the loss keeps beside them at its worst moment, for every prediction head; of
    a loss fused with the head, the gradients it makes already."""
    t = rows.layouts.tensor.astype(np.float64)
    heads = 1 + job.shape.mtp_num_layers
    deferred = np.minimum(job.facts.deferred_head_gradients, rows.microbatches) * job.facts.logit_gradient_bytes
    alive = tokens(job, rows) * (job.facts.logit_bytes * heads + deferred) * vocabulary(job, t) / t
    fused = job.facts.fused_loss
    if fused is not None:
        per_hidden = fused.weight_bytes * vocabulary(job, t) / t + fused.hidden_bytes * tokens(job, rows)
        alive = alive + per_hidden * job.shape.hidden_size * heads
    return np.where(rows.last, alive, 0.0)


def cached_logits(job: Job, rows: RankColumns) -> FloatColumn:
    """Last rank: memory of logits already freed that the loss's larger tensors do not fit into."""
    t = rows.layouts.tensor.astype(np.float64)
    return np.where(rows.last, tokens(job, rows) * job.facts.cached_logit_bytes * vocabulary(job, t) / t, 0.0)


def step_logits(job: Job, rows: RankColumns) -> FloatColumn:
    """Last rank of several: the logits of every micro-batch, where the pipeline returns them at the end of a step."""
    t = rows.layouts.tensor.astype(np.float64)
    alive = rows.microbatches * tokens(job, rows) * job.facts.step_logits_bytes * vocabulary(job, t) / t
    return np.where(rows.last & (rows.layouts.pipeline > 1), alive, 0.0)
