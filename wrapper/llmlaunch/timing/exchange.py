"""Communication inside a layer: tensor parallelism, the context-parallel ring, the exchange of a mixture's tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmlaunch.cluster.profile import Cluster
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.job import Job
from llmlaunch.timing.constants import constant
from llmlaunch.timing.network import all_to_all, links, ring
from llmlaunch.timing.products import Pace, Work

__all__ = ["Passes", "context_ring", "expert_exchange", "tensor_passes"]

FloatColumn = NDArray[np.float64]

RING_KERNELS = 30.0  # of a ring step forward and backward: attention in pieces, corrections, sends and receives
CORRECTION_BYTES = 20.0  # per query element and ring step: partial outputs and query gradients added up in fp32


@dataclass(frozen=True)
class Passes:
    """Tensor parallelism of one layer. A pass is a gather or a scatter of (tokens x hidden) over the group; `waited`
    of them stand in the way of the next product and `beside` run beside one."""

    seconds: FloatColumn  # of one pass
    waited: FloatColumn
    beside: FloatColumn

    def exposed(self, again_passes: FloatColumn, beside: FloatColumn) -> FloatColumn:
        """Seconds a layer waits, where `beside` are the seconds of products that run beside the hidden passes; those
        take a share of the device while they run. `again_passes` are repeated with recomputed products."""
        hidden = self.beside * self.seconds
        slowed = constant("overlap_cost") * hidden
        waits: FloatColumn = (self.waited + again_passes) * self.seconds + np.maximum(hidden - beside, slowed)
        return waits


def tensor_passes(job: Job, cluster: Cluster, lay: LayoutColumns, n: FloatColumn, mixture: bool) -> Passes:
    """Forward, gathers before the first matrix of attention and MLP and scatters after the second. Backward the same in
    reverse, of which the scatters run beside the weight gradients; with sequence parallelism the inputs are gathered
    once more, beside the input gradients (Korthikanti et al. 2022, section 4.2.2; megatron/core/tensor_parallel/
    layers.py, core 0.19). An all-reduce without sequence parallelism is two passes. Overlapped user buffers hide them
    all behind products. A mixture's MLP exchanges its tokens by itself."""
    blocks = 1.0 if mixture and not _shared_experts(job) else 2.0
    t = lay.tensor
    group = links(cluster, t, np.ones_like(t))
    seconds = ring(group, t, job.facts.activation_bytes * job.shape.hidden_size * n)
    split = lay.sequence_parallel > 0
    waited, beside = blocks * np.where(split, 3.0, 2.0), blocks * 2.0 * np.ones(len(lay))
    if job.facts.user_buffers:
        waited, beside = 0.0 * waited, waited + beside
    return Passes(seconds, waited, beside)


def _shared_experts(job: Job) -> bool:
    return job.shape.moe is not None and job.shape.moe.shared_expert_ffn_hidden_size > 0


def context_ring(job: Job, cluster: Cluster, lay: LayoutColumns, pace: Pace, n: FloatColumn, scores: Work) -> Work:
    """Keys and values travel around the ring, in the backward pass with their gradients, while attention works on those
    of the step before; what takes longer than that is waited for, as are the kernels of each step and the correction
    of partial results (Liu et al. 2023, Ring Attention, section 3; transformer_engine/pytorch/attention/
    context_parallel.py, 2.20). By all-to-all (DeepSpeed-Ulysses, Jacobs et al. 2023, section 3) heads are exchanged for
    sequence instead, and nothing hides it."""
    c, t = lay.context, lay.tensor
    if not np.any(c > 1):
        zero = np.zeros(len(lay))
        return Work(zero, zero)
    e, shape = job.facts.activation_bytes, job.shape
    groups = np.maximum(shape.num_query_groups / t, 1.0) * shape.head_dim
    if job.facts.context_all_to_all:
        moved = e * n * (2.0 * shape.query_width / t + 2.0 * groups)
        once = all_to_all(cluster, c, t, moved)
        return Work(once, once)
    group = links(cluster, c, t)
    steps = c - 1.0
    block = 2.0 * e * n * groups
    hop = block / group.bytes_per_second + group.latency_seconds
    fixed = steps * (
        RING_KERNELS * constant("kernel_seconds") + CORRECTION_BYTES / pace.element_wise * shape.query_width * n / t
    )
    forward = np.maximum(steps * (hop - scores.forward / c), 0.0) + fixed / 3.0
    backward = np.maximum(steps * (2.0 * hop - scores.backward / c), 0.0) + fixed * (2.0 / 3.0)
    return Work(np.where(c > 1, forward, 0.0), np.where(c > 1, backward, 0.0))


def expert_exchange(job: Job, cluster: Cluster, lay: LayoutColumns, n: FloatColumn) -> Work:
    """Tokens to their experts and back, forward and again backward. Dispatcher "alltoall" sends topk copies of every
    token over the expert group and gathers and scatters them over the expert-tensor group; "allgather" gathers every
    token over both and scatters the sums (megatron/core/transformer/moe/token_dispatcher.py, core 0.19). Delayed weight
    gradients run beside the exchange, and hide what their products take (`--overlap-moe-expert-parallel-comm`)."""
    moe = job.shape.moe
    assert moe is not None
    mine = job.facts.activation_bytes * job.shape.hidden_size * n / lay.tensor
    ep, etp = lay.expert, lay.expert_tensor
    one = np.ones_like(etp)
    if moe.token_dispatcher == "allgather":
        both = ep * etp
        once = 2.0 * ring(links(cluster, both, one), both, mine * both)
        return Work(once, once)
    copies = mine * moe.topk
    once = 2.0 * all_to_all(cluster, ep, etp, copies) + 2.0 * ring(links(cluster, etp, one), etp, copies * etp)
    if job.techniques.delay_weight_gradients:
        once = constant("overlap_cost") * once
    return Work(once, once)
