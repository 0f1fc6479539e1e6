"""Which links a group of ranks uses, and how long its collectives take on them; and the communication
inside a layer.

Ranks are numbered tensor fastest, then context, data and pipeline (Megatron `tp-cp-ep-dp-pp`,
megatron/core/parallel_state.py, core 0.19); experts have an order of their own, expert-tensor fastest, then expert,
then their data parallelism. So a group is `size` ranks, `stride` apart. Three tiers: devices of a node, of an NVLink
domain, and the fabric between domains, which every device reaches at the speed of its share of the adapters. Where the
network between the job's nodes was measured (`Cluster.network`), each group runs at the speed of the links it crosses.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from llmlaunch.cluster.profile import Cluster, HostLink, Link
from llmlaunch.columns import FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.layer import Layer
from llmlaunch.layers.matrix import OUTPUTS
from llmlaunch.layers.work import ContextTraffic
from llmlaunch.memory.job import Job
from llmlaunch.timing.products import DevicePace, SplitColumns, Work, constant


@frozen
class Links:
    """Bytes a second that each member of a group sends in a ring, and seconds of one of the ring's steps."""

    bytes_per_second: FloatColumn
    latency_seconds: FloatColumn


def links(cluster: Cluster, size: FloatColumn, stride: FloatColumn) -> Links:
    """Return the links of groups of `size` ranks, `stride` apart.

    Inside a node its links, inside an NVLink domain the domain's. A group across domains is a ring (or a hierarchy of
    rings) that leaves each domain once: the members inside share what has to cross and each brings its share of the
    adapters, so k members cross at k times the speed of one, and never faster than NVLink (measured on 4 nodes of 8
    B200: an all-reduce runs at ten times the speed of one device's adapter).
    """
    node, domain = cluster.devices_per_node, max(cluster.nvlink_domain_devices, cluster.devices_per_node)
    inside, rack, fabric = _tiers(cluster)
    far: float | FloatColumn = fabric
    if cluster.network is not None:
        far = _speeds(cluster.network.ring(size, stride), fabric)
    near: float | FloatColumn = inside
    if cluster.node_mesh:
        # no switch: each pair of devices has its own share of the links, and a group only those between its members
        near = near * np.clip((np.minimum(size, node) - 1.0) / max(node - 1, 1), 1.0 / max(node - 1, 1), 1.0)
    wide = min(inside, rack)
    span = size * stride
    together = np.minimum(np.maximum(np.floor(domain / stride), 1.0), size)
    outside = np.minimum(far * together, wide)
    bandwidth = by_tier(cluster, span, near, wide, outside)
    latency = by_tier(
        cluster,
        span,
        cluster.node_link.latency_seconds,
        cluster.domain_link.latency_seconds,
        cluster.fabric_link.latency_seconds,
    )
    return Links(bandwidth, latency)


def _tiers(
    cluster: Cluster, near_share: str = "nvlink_efficiency", far_share: str = "fabric_efficiency"
) -> tuple[float, float, float]:
    """Return the bytes a second that node, NVLink domain and fabric carry for one device: a share of what the data
    sheet says, by the constants of the kind of traffic, and all of what was measured."""

    def carried(link: Link, share: str) -> float:
        return link.bytes_per_second * (1.0 if link.measured else constant(share))

    return (
        carried(cluster.node_link, near_share),
        carried(cluster.domain_link, near_share),
        carried(cluster.fabric_link, far_share),
    )


def _speeds(seconds_per_byte: FloatColumn, otherwise: float) -> FloatColumn:
    """Return bytes a second; `otherwise` where no group leaves its node, so that nothing was measured."""
    crosses = seconds_per_byte > 0
    return np.where(crosses, 1.0 / np.where(crosses, seconds_per_byte, 1.0), otherwise)


def by_tier(
    cluster: Cluster,
    span: FloatColumn,
    node: float | FloatColumn,
    domain: float | FloatColumn,
    fabric: float | FloatColumn,
) -> FloatColumn:
    """Return one of three values, by whether `span` neighbouring devices lie in a node, in an NVLink domain, or
    beyond."""
    inside = span <= cluster.devices_per_node
    if cluster.nvlink_domain_devices <= cluster.devices_per_node:
        return np.where(inside, node, fabric)
    return np.where(inside, node, np.where(span <= cluster.nvlink_domain_devices, domain, fabric))


def ring(group: Links, size: FloatColumn, message_bytes: FloatColumn) -> FloatColumn:
    """Return the seconds of an all-gather or a reduce-scatter whose whole is `message_bytes`; an all-reduce is two of
    them. Zero for a group of one (Thakur et al. 2005, section 4)."""
    steps = np.maximum(size - 1.0, 0.0)
    travel = steps * (message_bytes / (size * group.bytes_per_second) + group.latency_seconds)
    return np.where(size > 1, travel + constant("collective_seconds"), 0.0)


def all_to_all(cluster: Cluster, size: FloatColumn, stride: FloatColumn, message_bytes: FloatColumn) -> FloatColumn:
    """Return the seconds until every rank has sent `message_bytes` in equal parts to all of its group, itself too."""
    together = in_domain(cluster, size, stride)
    share = message_bytes / size
    near = (together - 1.0) * share
    return exchange(cluster, size, stride, near, (size - together) * share, "nvlink_exchange_efficiency")


def in_domain(cluster: Cluster, size: FloatColumn, stride: FloatColumn) -> FloatColumn:
    """Return how many ranks of a group of `size` ranks, `stride` apart, lie in one NVLink domain."""
    domain = max(cluster.nvlink_domain_devices, cluster.devices_per_node)
    return np.minimum(np.maximum(np.floor(domain / stride), 1.0), size)


def exchange(
    cluster: Cluster,
    size: FloatColumn,
    stride: FloatColumn,
    near_bytes: FloatColumn,
    far_bytes: FloatColumn,
    near_share: str,
) -> FloatColumn:
    """Return the seconds until every rank of a group has sent `near_bytes` inside its NVLink domain and `far_bytes` to
    others, which travel at the same time. `near_share` is the constant of what such traffic reaches of NVLink's speed.
    Zero for a group of one."""
    inside, rack, fabric = _tiers(cluster, near_share, "fabric_exchange_efficiency")
    far: float | FloatColumn = fabric
    if cluster.network is not None:
        far = _speeds(cluster.network.exchange(size, stride), fabric)
    outside = size > in_domain(cluster, size, stride)
    latency = np.where(outside, cluster.fabric_link.latency_seconds, cluster.node_link.latency_seconds)
    travel = np.maximum(near_bytes / min(inside, rack), far_bytes / far)
    return np.where(size > 1, travel + latency + constant("collective_seconds"), 0.0)


def neighbour(cluster: Cluster, stride: FloatColumn, count: FloatColumn, message_bytes: FloatColumn) -> FloatColumn:
    """Return the seconds of sending `message_bytes` to the next of `count` ranks in a ring, `stride` apart; the slowest
    boundary decides, which one device's links or adapter carry. Zero where there is no next."""
    measured = None if cluster.network is None else cluster.network.ring(count, stride)
    return _hop(cluster, stride, count, message_bytes, measured)


def pipeline_hop(cluster: Cluster, stride: FloatColumn, count: FloatColumn, message_bytes: FloatColumn) -> FloatColumn:
    """Return the seconds of sending `message_bytes` from one of `count` stages to the next or back. On a measured
    network the slowest of the pipelines decides, and its hops add up: this is their mean (Pipette, Yim et al. 2024,
    T_pp)."""
    measured = None if cluster.network is None else cluster.network.chain(count, stride)
    return _hop(cluster, stride, count, message_bytes, measured)


def _hop(
    cluster: Cluster,
    stride: FloatColumn,
    count: FloatColumn,
    message_bytes: FloatColumn,
    measured: FloatColumn | None,
) -> FloatColumn:
    """`measured` is the seconds per byte between nodes, where they are known."""
    inside, rack, fabric = _tiers(cluster)
    pair = inside / max(cluster.devices_per_node - 1, 1) if cluster.node_mesh else inside
    far: float | FloatColumn = fabric if measured is None else _speeds(measured, fabric)
    span = stride * count
    each = by_tier(cluster, span, 1.0 / pair, 1.0 / rack, 1.0 / far)
    tiers = (cluster.node_link, cluster.domain_link, cluster.fabric_link)
    seconds = each * message_bytes + by_tier(cluster, span, *(link.latency_seconds for link in tiers))
    return np.where(count > 1, seconds, 0.0)


def exposed(seconds: FloatColumn, hiding: FloatColumn) -> FloatColumn:
    """Return by how many seconds a step is longer for transfers of `seconds` beside `hiding` seconds of computation:
    while it is hidden, a transfer takes a share of the device (`overlap_cost`): collectives occupy multiprocessors, and
    read and write the same memory."""
    slowed = constant("overlap_cost") * seconds
    return np.maximum(seconds - (1.0 - constant("overlap_cost")) * hiding, slowed)


def copied(cluster: Cluster, seconds: FloatColumn, hiding: FloatColumn) -> FloatColumn:
    """Return by how many seconds a step is longer for copies of `seconds` between device and host beside `hiding`
    seconds of computation. Copy engines carry them and no multiprocessor is held (CUDA C++ Programming Guide,
    "Overlap of Data Transfer and Kernel Execution"), so what is hidden takes its share of the device's memory bandwidth
    alone, a per cent or so: from 192K tokens on MEMO's swapping costs nothing that was seen (Zhao et al. 2025)."""
    share = min(host_link_bytes_per_second(cluster) / cluster.accelerator.memory_bytes_per_second, 1.0)
    return np.maximum(seconds - (1.0 - share) * hiding, share * seconds)


HOPPER = 9.0
# Nominal bytes a second of 16 lanes, one direction (PCI Express Base Specification: 16 and 32 GT/s, 128b/130b).
PCIE_4, PCIE_5 = ("16 lanes of PCIe 4.0", 31.5e9), ("16 lanes of PCIe 5.0", 63.0e9)


def host_link(cluster: Cluster) -> HostLink:
    """Return the accelerator's own link to its processor, else 16 lanes of PCI Express of its generation."""
    accelerator = cluster.accelerator
    if accelerator.host_link is not None:
        return accelerator.host_link
    capability = accelerator.compute_capability
    newer = capability is not None and float(capability) >= HOPPER
    memory = constant("host_memory_bytes_per_second") / cluster.devices_per_node
    return HostLink(*(PCIE_5 if newer else PCIE_4), memory)


def host_link_bytes_per_second(cluster: Cluster) -> float:
    """Return the rate of each device's transfers, per direction, while all devices of the node copy: what was measured,
    else a share of the link, divided among the devices that have it in common, and no more than their share of what the
    node's memory takes."""
    if cluster.host_copy_bytes_per_second is not None:
        return cluster.host_copy_bytes_per_second / cluster.host_seconds_factor
    link = host_link(cluster)
    carried = constant("host_link_efficiency") * link.bytes_per_second / cluster.devices_per_uplink
    return min(carried, link.memory_bytes_per_second) / cluster.host_seconds_factor


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
