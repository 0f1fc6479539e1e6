"""Which links a group of ranks uses, and how long its collectives take on them.

Ranks are numbered tensor fastest, then context, data and pipeline (Megatron `tp-cp-ep-dp-pp`,
megatron/core/parallel_state.py, core 0.19); experts have an order of their own, expert-tensor fastest, then expert,
then their data parallelism. So a group is `size` ranks, `stride` apart. Three tiers: devices of a node, of an NVLink
domain, and the fabric between domains, which every device reaches at the speed of its share of the adapters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmlaunch.cluster.profile import Cluster
from llmlaunch.timing.constants import constant

__all__ = ["Links", "all_to_all", "links", "neighbour", "ring"]

FloatColumn = NDArray[np.float64]


@dataclass(frozen=True)
class Links:
    """Bytes a second that each member of a group sends in a ring, seconds of one of the ring's steps, and of a group
    that leaves its NVLink domain, how many of its members lie in one."""

    bytes_per_second: FloatColumn
    latency_seconds: FloatColumn
    together: FloatColumn


def links(cluster: Cluster, size: FloatColumn, stride: FloatColumn) -> Links:
    """The links of groups of `size` ranks, `stride` apart.

    Inside a node its links, inside an NVLink domain the domain's. A group across domains is a ring (or a hierarchy of
    rings) that leaves each domain once: the members inside share what has to cross and each brings its share of the
    adapters, so k members cross at k times the speed of one, and never faster than NVLink (measured on 4 nodes of 8
    B200: an all-reduce runs at ten times the speed of one device's adapter).
    """
    node, domain = cluster.devices_per_node, max(cluster.nvlink_domain_devices, cluster.devices_per_node)
    near: float | FloatColumn = constant("nvlink_efficiency") * cluster.node_link.bytes_per_second
    if cluster.node_mesh:
        # no switch: each pair of devices has its own share of the links, and a group only those between its members
        near = near * np.clip((np.minimum(size, node) - 1.0) / max(node - 1, 1), 1.0 / max(node - 1, 1), 1.0)
    wide = constant("nvlink_efficiency") * min(cluster.domain_link.bytes_per_second, cluster.node_link.bytes_per_second)
    far = constant("fabric_efficiency") * cluster.fabric_link.bytes_per_second
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
    return Links(bandwidth, latency, together)


def by_tier(
    cluster: Cluster,
    span: FloatColumn,
    node: float | FloatColumn,
    domain: float | FloatColumn,
    fabric: float | FloatColumn,
) -> FloatColumn:
    """One of three values, by whether `span` neighbouring devices lie in a node, in an NVLink domain, or beyond."""
    inside = span <= cluster.devices_per_node
    if cluster.nvlink_domain_devices <= cluster.devices_per_node:
        return np.where(inside, node, fabric)
    return np.where(inside, node, np.where(span <= cluster.nvlink_domain_devices, domain, fabric))


def ring(group: Links, size: FloatColumn, message_bytes: FloatColumn) -> FloatColumn:
    """Seconds of an all-gather or a reduce-scatter whose whole is `message_bytes`; an all-reduce is two of them. Zero
    for a group of one (Thakur et al. 2005, section 4)."""
    steps = np.maximum(size - 1.0, 0.0)
    travel = steps * (message_bytes / (size * group.bytes_per_second) + group.latency_seconds)
    return np.where(size > 1, travel + constant("collective_seconds"), 0.0)


def all_to_all(cluster: Cluster, size: FloatColumn, stride: FloatColumn, message_bytes: FloatColumn) -> FloatColumn:
    """Seconds until every rank has sent `message_bytes` in equal parts to all of its group, itself included. What
    leaves the NVLink domain and what stays inside travel at the same time."""
    domain = max(cluster.nvlink_domain_devices, cluster.devices_per_node)
    near = constant("nvlink_efficiency") * min(cluster.node_link.bytes_per_second, cluster.domain_link.bytes_per_second)
    far = constant("fabric_efficiency") * cluster.fabric_link.bytes_per_second
    together = np.minimum(np.maximum(np.floor(domain / stride), 1.0), size)
    share = message_bytes / size
    outside = size > together
    latency = np.where(outside, cluster.fabric_link.latency_seconds, cluster.node_link.latency_seconds)
    travel = np.maximum((together - 1.0) * share / near, (size - together) * share / far)
    return np.where(size > 1, travel + latency + constant("collective_seconds"), 0.0)


def neighbour(cluster: Cluster, stride: FloatColumn, count: FloatColumn, message_bytes: FloatColumn) -> FloatColumn:
    """Seconds of sending `message_bytes` to the next of `count` ranks in a row, `stride` apart; the slowest boundary
    decides. Zero where there is no next."""
    near, far = constant("nvlink_efficiency"), constant("fabric_efficiency")
    tiers = (
        (near, cluster.node_link),
        (near, cluster.domain_link),
        (far, cluster.fabric_link),
    )
    span = stride * count
    each = by_tier(cluster, span, *(1.0 / (share * link.bytes_per_second) for share, link in tiers))
    seconds = each * message_bytes + by_tier(cluster, span, *(link.latency_seconds for _, link in tiers))
    return np.where(count > 1, seconds, 0.0)
