"""Communication inside a layer: tensor parallelism, the context-parallel ring, the exchange of a mixture's tokens."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from llmlaunch.cluster.profile import Cluster
from llmlaunch.columns import FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.layer import Layer
from llmlaunch.layers.matrix import OUTPUTS
from llmlaunch.layers.work import ContextTraffic
from llmlaunch.memory.job import Job
from llmlaunch.timing.constants import constant
from llmlaunch.timing.network import all_to_all, exchange, in_domain, links, neighbour, ring
from llmlaunch.timing.products import DevicePace, SplitColumns, Work

if TYPE_CHECKING:
    from llmlaunch.layers.mixture import Mixture


RING_KERNELS = 30.0  # of a ring step forward and backward: attention in pieces, corrections, sends and receives
CORRECTION_BYTES = 20.0  # per query element and ring step: partial outputs and query gradients added up in fp32


@frozen
class TensorPasses:
    """Tensor parallelism of one layer. A pass is a gather or a scatter of (tokens x hidden) over the group; `waited`
    of them stand in the way of the next product and `beside` run beside one."""

    seconds: FloatColumn  # of one pass
    waited: float | FloatColumn
    beside: float | FloatColumn

    def exposed(self, products: FloatColumn) -> FloatColumn:
        """Return the seconds a layer waits, where `products` are the seconds of those that run beside the hidden
        passes; these take a share of the device while they run."""
        hidden = self.beside * self.seconds
        slowed: FloatColumn = np.maximum(hidden - products, constant("overlap_cost") * hidden)
        return self.waited * self.seconds + slowed


def tensor_passes(job: Job, at: SplitColumns, seconds: FloatColumn, layer: Layer) -> TensorPasses:
    """Return the passes of a layer, each of `seconds`. Forward, gathers before the first matrix of attention and MLP
    and scatters after the second. Backward the same in reverse, of which the scatters run beside the weight gradients;
    with sequence parallelism the inputs are gathered once more, beside the input gradients (Korthikanti et al. 2022,
    section 4.2.2; megatron/core/tensor_parallel/layers.py, core 0.19). An all-reduce without sequence parallelism is
    two passes. Overlapped user buffers hide them all behind products. What quantized linears gather is narrow already
    (transformer_engine/pytorch/distributed.py gather_along_first_dim, 2.20); what is scattered is not.
    AutoTP's matrices each reduce their input's gradient by themselves, and nothing runs beside
    (deepspeed/module_inject/layers.py ColumnParallel, 0.19.8)."""
    blocks = sum(block.collective_pairs for block in layer.blocks)
    if job.facts.exchange.inputs_reduced_apart:
        reading = [
            len(matrix.parts)
            for block in layer.blocks
            for matrix in block.products
            if matrix.divided == OUTPUTS and not matrix.of_experts
        ]
        return TensorPasses(seconds, 2.0 * (blocks + float(sum(reading))), 0.0)
    narrow, width = job.facts.layer.quantized, job.facts.layer.activation_bytes
    gather = 1.0 if narrow is None else narrow.input_bytes / width
    parallel = at.layouts.sequence_parallel > 0
    waited = blocks * np.where(parallel, 1.0 + 2.0 * gather, 2.0)
    beside = blocks * np.where(parallel, 1.0 + gather, 2.0)
    if job.facts.exchange.user_buffers:
        return TensorPasses(seconds, 0.0, waited + beside)
    return TensorPasses(seconds, waited, beside)


def tensor_pass(job: Job, cluster: Cluster, at: SplitColumns) -> FloatColumn:
    """Return the seconds of gathering or scattering (tokens x hidden) over tensor parallelism."""
    message = (job.facts.layer.activation_bytes * job.shape.hidden_size) * at.tokens
    # sizes are few and links depend on nothing else: they are computed once for each size
    sizes = np.arange(1.0, float(at.tensor.max(initial=1.0)) + 1.0)
    unit, place = np.ones_like(sizes), at.layouts.tensor - 1
    group = links(cluster, sizes, unit)
    fixed = ring(group, sizes, 0.0 * sizes)
    each = ring(group, sizes, unit) - fixed
    return fixed[place] + each[place] * message


def context_exchange(
    job: Job, cluster: Cluster, at: SplitColumns, pace: DevicePace, traffic: ContextTraffic, scores: Work
) -> Work:
    """Return the work of context parallelism for one block. Keys and values travel around the ring, in the backward
    pass with their gradients, while attention works on those of the step before; what takes longer than that is waited
    for, as are the kernels of each step and the correction of partial results (Liu et al. 2023, Ring Attention, section
    3; transformer_engine/pytorch/attention/ context_parallel.py, 2.20). By all-to-all (DeepSpeed-Ulysses, Jacobs et al.
    2023, section 3), and around recurrences, heads are exchanged for sequence instead, and nothing hides it."""
    c, e = at.context, job.facts.layer.activation_bytes
    if traffic.ring is None or job.facts.attention.context_all_to_all:
        once = all_to_all(cluster, c, at.tensor, (e * traffic.exchanged) * at.share)
        return Work(once, once)
    steps = c - 1.0
    hop = neighbour(cluster, at.tensor, c, (2.0 * e) * at.tokens * traffic.ring)
    kernels = RING_KERNELS * constant("kernel_seconds")
    fixed = steps * (kernels + (CORRECTION_BYTES / pace.element_wise * traffic.corrected) * at.share)
    busy = 1.0 / c
    forward = steps * np.maximum(hop - busy * scores.forward, 0.0) + fixed / 3.0
    backward = steps * np.maximum(2.0 * hop - busy * scores.backward, 0.0) + fixed * (2.0 / 3.0)
    return Work(forward, backward)


def expert_exchange(job: Job, cluster: Cluster, at: SplitColumns, mixture: Mixture) -> Work:
    """Return the exchange of tokens with their experts, forward and backward, where nothing hides it.

    Dispatcher "alltoall" sends topk copies of every token over the expert group and gathers and scatters them over the
    expert-tensor group; "allgather" gathers every token over both and scatters the sums; "flex" sends a token once to
    each NVLink domain that has any of its experts, where it is spread once to each device that has (DeepEP and
    HybridEP; megatron/core/transformer/moe/token_dispatcher.py and fused_a2a.py, core 0.19)."""
    mine = (job.facts.layer.activation_bytes * mixture.outer) * at.share
    ep, etp = at.layouts.expert.astype(np.float64), at.layouts.expert_tensor.astype(np.float64)
    unit = np.ones(len(at))
    if job.techniques.token_dispatcher == "allgather":
        both = ep * etp
        once = 2.0 * ring(links(cluster, both, unit), both, mine * both)
    elif job.techniques.token_dispatcher == "flex":
        once = 2.0 * _sent_once(mixture, cluster, ep, etp, mine)
    else:
        copies = mixture.topk * mine
        once = 2.0 * all_to_all(cluster, ep, etp, copies)
        if np.any(at.layouts.expert_tensor > 1):
            once = once + 2.0 * ring(links(cluster, etp, unit), etp, copies * etp)
    return Work(once, once)


def bytes_leaving_domain(job: Job, cluster: Cluster, at: SplitColumns, mixture: Mixture) -> FloatColumn:
    """Return the bytes that a device sends out of its NVLink domain to bring a micro-batch's tokens to their experts
    once; to bring them back takes as many."""
    mine = (job.facts.layer.activation_bytes * mixture.outer) * at.share
    devices = (at.layouts.expert * at.layouts.expert_tensor).astype(np.float64)
    together = in_domain(cluster, devices, np.ones(len(at)))
    if job.techniques.token_dispatcher == "allgather":  # a ring, whose members in a domain share what leaves it
        return np.asarray(np.where(devices > together, mine * (devices - 1.0) / together, 0.0))
    copies: float | FloatColumn = mixture.topk
    if job.techniques.token_dispatcher == "flex":
        domain = max(cluster.nvlink_domain_devices, cluster.devices_per_node)
        copies = _reach(mixture, domain, int(devices.max(initial=1.0)))[1][devices.astype(np.int64)]
    return np.asarray(copies * (1.0 - together / devices) * mine)


def _sent_once(
    mixture: Mixture, cluster: Cluster, ep: FloatColumn, etp: FloatColumn, token_bytes: FloatColumn
) -> FloatColumn:
    """Return the seconds of sending every token once to each domain and each device that has any of its experts. What
    crosses domains and what is spread inside travel at the same time, chunk by chunk. All expert-tensor ranks of an
    expert get its tokens."""
    devices, unit = ep * etp, np.ones_like(ep)
    together = in_domain(cluster, devices, unit)
    domain = max(cluster.nvlink_domain_devices, cluster.devices_per_node)
    by_devices, by_domains = _reach(mixture, domain, int(devices.max(initial=1.0)))
    spread = by_devices[ep.astype(np.int64)] * etp * (1.0 - 1.0 / together)
    crossing = by_domains[devices.astype(np.int64)] * (1.0 - together / devices)
    near, far = spread * token_bytes, crossing * token_bytes
    return exchange(cluster, devices, unit, near, far, "nvlink_spread_efficiency")


@cache
def _reach(mixture: Mixture, domain: int, most: int) -> tuple[FloatColumn, FloatColumn]:
    """Return, for each number of devices up to `most`, how many of them and how many domains a token's experts lie in
    on average: sizes are few, and nothing else decides it."""
    sizes = np.maximum(np.arange(most + 1.0), 1.0)
    return distinct_parts(mixture, sizes), distinct_parts(mixture, np.maximum(sizes / domain, 1.0))


def distinct_parts(mixture: Mixture, parts: FloatColumn) -> FloatColumn:
    """Return the mean number of parts that hold any of a token's experts, where the experts are divided into so many
    equal `parts` and tokens choose evenly. A router that chooses groups of experts first (DeepSeek-V3, section 2.1.2)
    reaches fewer."""
    experts, topk = mixture.experts, mixture.topk
    part = experts / parts
    if mixture.groups is None or mixture.group_topk is None:
        return parts * (1.0 - _missed(experts, part, topk))
    group, chosen = experts / mixture.groups, mixture.group_topk
    open_experts = group * chosen
    inside = chosen / mixture.groups * (1.0 - _missed(open_experts, part, topk))
    inner = np.maximum(part / group, 1.0)  # groups in a part
    reached, total = np.zeros_like(parts), np.zeros_like(parts)
    for count in range(chosen + 1):  # of the chosen groups lie in the part
        chance = _choose(inner, count) * _choose(mixture.groups - inner, chosen - count)
        total = total + chance
        reached = reached + chance * (1.0 - _missed(open_experts, count * group, topk))
    return parts * np.where(part <= group, inside, reached / total)


def _missed(total: float, part: float | FloatColumn, drawn: int) -> float | FloatColumn:
    """Return the chance that none of `drawn` different experts of `total` is one of `part`."""
    chance: float | FloatColumn = 1.0
    for already in range(drawn):
        chance = chance * np.maximum(total - part - already, 0.0) / (total - already)
    return chance


def _choose(total: FloatColumn, drawn: int) -> FloatColumn:
    """Return the binomial coefficient of `drawn` of `total`; between whole numbers, the polynomial's value."""
    count = np.ones_like(total)
    for already in range(drawn):
        count = count * np.maximum(total - already, 0.0) / (already + 1.0)
    return count
