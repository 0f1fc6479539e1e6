"""Which links a group of ranks uses, and how long its collectives take on them.

Ranks are numbered tensor fastest, then context, data and pipeline (Megatron `tp-cp-ep-dp-pp`,
megatron/core/parallel_state.py, core 0.19); experts have an order of their own, expert-tensor fastest, then expert,
then their data parallelism. So a group is `size` ranks, `stride` apart. Three tiers: devices of a node, of an NVLink
domain, and the fabric between domains, which every device reaches at the speed of its share of the adapters. Where the
network between the job's nodes was measured (`Cluster.network`), each group runs at the speed of the links it crosses.
"""

from __future__ import annotations

import numpy as np

from llmlaunch.cluster.profile import Cluster, HostLink, Link
from llmlaunch.columns import FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.timing.constants import constant


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
