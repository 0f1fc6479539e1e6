"""The machine of a measurement record: what a record says of it, and that read back; and the class of jobs on it whose
step times say something of one another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from llmlaunch.cluster.profile import Cluster, Link
from llmlaunch.frozen import frozen
from llmlaunch.units import GB

if TYPE_CHECKING:
    from llmlaunch.calibration.records import Record
    from llmlaunch.cluster.matrix import BandwidthMatrix


TIERS = ("node", "domain", "fabric")
OF_MACHINE = (
    *("devices_per_node", "nvlink_domain_devices", "node_mesh", "devices_per_uplink", "host_copy_bytes_per_second"),
)


def machine_json(cluster: Cluster) -> dict[str, Any]:
    """Return what a measurement record says of the machine its step was timed on (`machine`, docs/store.md): what makes
    its class, how its host is reached, and the median link where the network was measured."""
    links = {tier: getattr(cluster, f"{tier}_link") for tier in TIERS}
    return {
        **{name: getattr(cluster, name) for name in OF_MACHINE},
        "links": {tier: [link.bytes_per_second, link.latency_seconds, link.measured] for tier, link in links.items()},
        "network_bytes_per_second": None if cluster.bandwidth is None else median(_speeds(cluster.bandwidth)),
    }


def _speeds(matrix: BandwidthMatrix) -> list[float]:
    return [speed for i, row in enumerate(matrix.bytes_per_second) for j, speed in enumerate(row) if i != j]


def recorded_machine(record: Record, clusters: Mapping[str, Cluster]) -> Cluster | None:
    """Return the machine of a record: the one of its card, as the record describes it; None for an unknown card.
    `clusters` are machines by accelerator (`cluster.cards.machines`). Raises KeyError, TypeError or ValueError for a
    description that is none."""
    from llmlaunch.calibration.records import machine_of

    known, machine = machine_of(record, clusters), record.get("machine")
    if known is None or machine is None:
        return known
    values: dict[str, Any] = {name: machine[name] for name in OF_MACHINE}
    for tier in TIERS:
        speed, latency, measured = machine["links"][tier]
        values[f"{tier}_link"] = Link(float(speed), float(latency), bool(measured))
    return replace(known, bandwidth=None, **values)


def timed_machine(record: Record, cluster: Cluster) -> Cluster:
    """Return the machine with the median of its measured network, where it has one, in place of the fabric."""
    measured = (record.get("machine") or {}).get("network_bytes_per_second")
    if measured is None:
        return cluster
    return replace(cluster, fabric_link=Link(float(measured), cluster.fabric_link.latency_seconds, measured=True))


@frozen
class TimeClass:
    """What step times are compared by: a backend (a value of `frameworks.recorded.TABLES`), dense or mixture, and the
    machine: its accelerator, the devices of its nodes and NVLink domains, and the speeds of its links. The name of a
    profile does not matter."""

    backend: str
    mixture: bool
    accelerator: str
    machine: str

    @property
    def key(self) -> tuple[str, str]:
        """The backend and the rest in words, by which a calibration is kept."""
        models = "mixtures" if self.mixture else "dense models"
        return self.backend, f"step time of {models} on {self.accelerator} {self.machine}"


def time_class(backend: str, mixture: bool, cluster: Cluster) -> TimeClass:
    """Return the class of the jobs of a backend on `cluster`."""
    domain, devices = cluster.nvlink_domain_devices, cluster.devices_per_node
    links = {"node": cluster.node_link, "domain": cluster.domain_link, "fabric": cluster.fabric_link}
    if domain <= devices:
        del links["domain"]
    speeds = ", ".join(f"{name} {link.bytes_per_second / GB:.4g} GB/s" for name, link in links.items())
    rack = f", {domain} in a domain" if domain > devices else ""
    return TimeClass(backend, mixture, cluster.accelerator.name, f"x{devices}{rack}, {speeds}")
