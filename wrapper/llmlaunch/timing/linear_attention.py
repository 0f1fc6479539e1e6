"""Seconds of gated delta nets, in the mean of all layers: the recurrence in chunks, and what is read and written around
it.

Arithmetic and traffic are counted from the kernels of flash-linear-attention 0.4 (fla/ops/gated_delta_rule,
ops/common/chunk_delta_h.py and chunk_o.py) and from megatron/core/ssm/gated_delta_net, core 0.19. No measured run
stands behind them yet.
"""

from __future__ import annotations

import numpy as np

from llmlaunch.cluster.profile import Cluster
from llmlaunch.memory.job import Job
from llmlaunch.models.shape import LinearAttention, ModelShape
from llmlaunch.timing.network import all_to_all
from llmlaunch.timing.products import DevicePace, SplitColumns, Work, linear_share

__all__ = ["delta_rule", "mean_context", "of_full_layers"]


CHUNK = 64.0  # tokens solved at a time
BACKWARD = 3.0  # each product has two gradients, and is computed again for them


def delta_rule(job: Job, pace: DevicePace, at: SplitColumns) -> Work:
    """Return the seconds of convolution, recurrence and gated norm."""
    linear, share = job.shape.linear_attention, linear_share(job.shape)
    assert linear is not None
    seconds = _flops(linear) / pace.attention_forward
    seconds += job.facts.activation_bytes * _elements(linear) / pace.element_wise
    forward = (share * seconds) * at.share
    return Work(forward, BACKWARD * forward)


def of_full_layers(shape: ModelShape, work: Work) -> Work:
    """Return in the mean of all layers the work of those with ordinary attention."""
    share = 1.0 - linear_share(shape)
    return Work(share * work.forward, share * work.backward)


def mean_context(job: Job, cluster: Cluster, at: SplitColumns, ring: Work | None) -> Work | None:
    """Return the work of context parallelism: heads of gated delta nets are exchanged for sequence, before them and
    behind them, and nothing hides it."""
    linear = job.shape.linear_attention
    if ring is None or linear is None:
        return ring
    width = float(linear.projected_width + linear.value_width)
    once = all_to_all(cluster, at.context, at.tensor, (job.facts.activation_bytes * width) * at.share)
    once = linear_share(job.shape) * np.where(at.layouts.context > 1, once, 0.0)
    return of_full_layers(job.shape, ring) + Work(once, once)


def _flops(linear: LinearAttention) -> float:
    """Return a token's operations forward: within its chunk the keys' products with each other and with queries, and
    what they weigh; of the state the products with keys and queries, and the update."""
    keys, values = float(linear.key_head_dim), float(linear.value_head_dim)
    return linear.num_value_heads * (CHUNK * (6.0 * keys + 4.0 * values) + 6.0 * keys * values)


def _elements(linear: LinearAttention) -> float:
    """Return the elements a token reads and writes forward: by the convolution, by norms and copies of queries and
    keys, by kernels of the recurrence with the states between chunks, and by norm and gate behind it."""
    queries = 2.0 * linear.key_width
    expanded = 2.0 * linear.num_value_heads * linear.key_head_dim
    values = float(linear.value_width)
    states = linear.key_head_dim * values / CHUNK
    return 2.0 * linear.convolved_width + 5.0 * queries + 4.0 * expanded + 14.0 * values + 3.0 * states
