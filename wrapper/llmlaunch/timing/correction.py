"""Factors by which measured runs correct step times on one cluster, and the cluster that is timed with them.

A factor multiplies seconds: of computation on a device, of each tier of the network, and of the host, which launches
kernels and copies to and from devices. All formulas read their rates from the cluster, so a corrected cluster corrects
every one of them, for one layout and for a million.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmlaunch.cluster.profile import Cluster, Link
from llmlaunch.frozen import frozen

FACTORS = ("compute", "node", "domain", "fabric", "host")


@frozen
class TimeCorrection:
    """The factor of each kind of seconds: 1.08 = 8 % longer than predicted. `runs` are the configurations it was
    learned from; `job_factor` multiplies all five for one job that ran before, and is included in none of them."""

    compute: float = 1.0
    node: float = 1.0
    domain: float = 1.0
    fabric: float = 1.0
    host: float = 1.0
    job_factor: float = 1.0
    runs: int = 0
    calibration_id: str | None = None

    def __post_init__(self) -> None:
        if not all(0.0 < factor < math.inf for factor in (*self.factors.values(), self.job_factor)):
            raise ValueError(f"a factor of seconds is positive and finite: {self}")

    @property
    def factors(self) -> Mapping[str, float]:
        """The learned factors by the names of FACTORS."""
        return {name: getattr(self, name) for name in FACTORS}

    def with_factors(self, factors: Mapping[str, float]) -> TimeCorrection:
        """Return the correction with other factors of these names."""
        changes: dict[str, Any] = dict(factors)
        return replace(self, **changes)

    @property
    def changes_nothing(self) -> bool:
        return self.job_factor == 1.0 and all(factor == 1.0 for factor in self.factors.values())


NO_TIME_CORRECTION = TimeCorrection()


def corrected_cluster(cluster: Cluster, correction: TimeCorrection) -> Cluster:
    """Return the cluster with rates and latencies that give corrected seconds; the cluster itself where nothing is
    corrected. Where an NVLink domain is a node, the domain's links are the node's."""
    if correction.changes_nothing:
        return cluster
    compute, node, domain, fabric, host = (correction.job_factor * factor for factor in correction.factors.values())
    if cluster.nvlink_domain_devices <= cluster.devices_per_node:
        domain = node
    device, network = cluster.accelerator, cluster.network
    if network is not None:
        from llmlaunch.cluster.matrix import MeasuredNetwork

        network = MeasuredNetwork(fabric * network.seconds_per_byte, network.devices_per_node)
    return replace(
        cluster,
        accelerator=replace(
            device,
            flops_per_second={name: peak / compute for name, peak in device.flops_per_second.items()},
            memory_bytes_per_second=device.memory_bytes_per_second / compute,
        ),
        node_link=_slowed(cluster.node_link, node),
        domain_link=_slowed(cluster.domain_link, domain),
        fabric_link=_slowed(cluster.fabric_link, fabric),
        network=network,
        host_seconds_factor=cluster.host_seconds_factor * host,
    )


def _slowed(link: Link, factor: float) -> Link:
    return replace(link, bytes_per_second=link.bytes_per_second / factor, latency_seconds=link.latency_seconds * factor)
