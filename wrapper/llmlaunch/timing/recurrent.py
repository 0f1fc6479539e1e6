"""Seconds of gated delta nets and Mamba-2 mixers, in the mean of layers: the recurrence in chunks, and what is read and
written around it.

Arithmetic and traffic are counted from the kernels of flash-linear-attention 0.4 (fla/ops/gated_delta_rule,
ops/common/chunk_delta_h.py and chunk_o.py), of mamba-ssm 2.3 (mamba_ssm/ops/triton/ssd_*.py), and from
megatron/core/ssm, core 0.19. No measured run stands behind them yet.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import numpy as np

from llmlaunch.cluster.profile import Cluster
from llmlaunch.layers.delta_net import DELTA_CHUNK
from llmlaunch.layers.mamba import MAMBA_CHUNK
from llmlaunch.memory.job import Job
from llmlaunch.models.kinds import kind_shares
from llmlaunch.models.mamba import CONV_KERNEL, Mamba
from llmlaunch.models.shape import LinearAttention, ModelShape
from llmlaunch.timing.compressed import compressed_scores
from llmlaunch.timing.exchange import context_ring
from llmlaunch.timing.network import all_to_all
from llmlaunch.timing.products import DevicePace, SplitColumns, Work, attention_scores, part_share

__all__ = ["MAMBA_KERNELS", "mixers"]


BACKWARD = 3.0  # each product has two gradients, and is computed again for them


# Launched by one mixer forward and backward: norm and projections, convolution, decays of a chunk, its states, their
# passing, products, scan, norm behind it and residual; backward the first five again, and a gradient of each
MAMBA_KERNELS = (18.0, 45.0)


def recurrence(job: Job, pace: DevicePace, at: SplitColumns) -> Work:
    """Return the seconds of convolution, recurrence and gated norm."""
    shape, linear, mamba = job.shape, job.shape.linear_attention, job.shape.mamba
    flops = elements = share = 0.0
    if linear is not None:
        flops, elements, share = _flops(linear), _elements(linear), part_share(shape, "linear")
    elif mamba is not None:
        flops, elements, share = _scan_flops(mamba), _scan_elements(mamba), part_share(shape, "mamba")
    seconds = flops / pace.attention_forward + job.facts.activation_bytes * elements / pace.element_wise
    forward = (share * seconds) * at.share
    return Work(forward, BACKWARD * forward)


def of_full_layers(shape: ModelShape, work: Work) -> Work:
    """Return in the mean of all layers the work of those with ordinary attention."""
    share = part_share(shape, "attention")
    return Work(share * work.forward, share * work.backward)


def mean_context(job: Job, cluster: Cluster, at: SplitColumns, ring: Work | None) -> Work | None:
    """Return the work of context parallelism: heads of recurrent mixers are exchanged for sequence, before them and
    behind them, and nothing hides it."""
    shape, linear, mamba = job.shape, job.shape.linear_attention, job.shape.mamba
    if ring is None:
        return ring
    width = share = 0.0
    if linear is not None:
        width, share = float(linear.projected_width + linear.value_width), part_share(shape, "linear")
    elif mamba is not None:
        width, share = float(mamba.projected_width + mamba.inner_width), part_share(shape, "mamba")
    once = all_to_all(cluster, at.context, at.tensor, (job.facts.activation_bytes * width) * at.share)
    once = share * np.where(at.layouts.context > 1, once, 0.0)
    return of_full_layers(shape, ring) + Work(once, once)


def _flops(linear: LinearAttention) -> float:
    """Return a token's operations forward: within its chunk the keys' products with each other and with queries, and
    what they weigh; of the state the products with keys and queries, and the update."""
    keys, values = float(linear.key_head_dim), float(linear.value_head_dim)
    return linear.num_value_heads * (DELTA_CHUNK * (6.0 * keys + 4.0 * values) + 6.0 * keys * values)


def _elements(linear: LinearAttention) -> float:
    """Return the elements a token reads and writes forward: by the convolution, by norms and copies of queries and
    keys, by kernels of the recurrence with the states between chunks, and by norm and gate behind it."""
    queries = 2.0 * linear.key_width
    expanded = 2.0 * linear.num_value_heads * linear.key_head_dim
    values = float(linear.value_width)
    states = linear.key_head_dim * values / DELTA_CHUNK
    return 2.0 * linear.convolved_width + 5.0 * queries + 4.0 * expanded + 14.0 * values + 3.0 * states


def _scan_flops(mamba: Mamba) -> float:
    """Return a token's operations forward: within its chunk the products of each group, and half of what they weigh of
    each column; of the state the update and what is read (Dao and Gu 2024, section 6)."""
    within = 2.0 * MAMBA_CHUNK * mamba.groups * mamba.state_size + MAMBA_CHUNK * mamba.inner_width
    return within + 4.0 * mamba.inner_width * mamba.state_size + 2.0 * CONV_KERNEL * mamba.convolved_width


def _scan_elements(mamba: Mamba) -> float:
    """Return the elements a token reads and writes forward: by the convolution, by the kernels of states and scan with
    the states between chunks, in fp32 before they are passed on, by the gate, and by the norm behind it."""
    states = mamba.inner_width * mamba.state_size / MAMBA_CHUNK
    products = 2.0 * 2.0 * mamba.groups * MAMBA_CHUNK
    return 4.0 * mamba.convolved_width + 8.0 * mamba.inner_width + 6.0 * states + products


def mixers(
    job: Job, cluster: Cluster, at: SplitColumns, pace: DevicePace, mixture: bool
) -> tuple[Work, Work, Work | None]:
    """Return the seconds of attention, of that and of recurrences, and of context parallelism, in the mean of all
    layers; of layers of one part each, mixtures have none of it."""
    none, shape = np.zeros(len(at)), job.shape
    if mixture and shape.mamba is not None:
        return Work(none, none), Work(none, none), None
    ordinary = _mean_scores(job, pace, at) if shape.compressed_attention is None else compressed_scores(job, pace, at)
    context = context_ring(job, cluster, at, pace, ordinary)
    if shape.linear_attention is None and shape.mamba is None:
        return ordinary, ordinary, context
    ordinary, context = of_full_layers(shape, ordinary), mean_context(job, cluster, at, context)
    return ordinary, ordinary + recurrence(job, pace, at), context


def _mean_scores(job: Job, pace: DevicePace, at: SplitColumns) -> Work:
    """Return the seconds of attention, in the mean of all layers whose attention is softmax."""
    of_kinds = [(attention_scores(replace(job, shape=kind), pace, at), share) for kind, share in kind_shares(job.shape)]
    if len(of_kinds) == 1:
        return of_kinds[0][0]
    forward, backward = (
        reduce(np.add, (share * getattr(work, name) for work, share in of_kinds)) for name in ("forward", "backward")
    )
    return Work(forward, backward)
