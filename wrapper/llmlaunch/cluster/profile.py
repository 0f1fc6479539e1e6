"""The machine: accelerators, nodes and the three network tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from llmlaunch.cluster.matrix import BandwidthMatrix

if TYPE_CHECKING:
    from llmlaunch.cluster.measured_network import MeasuredNetwork

__all__ = ["Accelerator", "Cluster", "HostLink", "Link", "Site"]


@dataclass(frozen=True)
class Link:
    """One tier of the network, per device and direction."""

    bytes_per_second: float
    latency_seconds: float
    measured: bool = False


@dataclass(frozen=True)
class HostLink:
    """Nominal bytes a second between one device and its node's memory, each direction, and what that memory carries for
    each device while all of the node use it."""

    name: str
    bytes_per_second: float
    memory_bytes_per_second: float


@dataclass(frozen=True)
class Accelerator:
    """One device.

    `memory_bytes` is what torch reports as `total_memory`; where nobody has read it on a real card it is the
    data sheet's figure and `memory_source` says so. `flops_per_second` is dense matrix peak by precision.
    """

    name: str
    kind: str  # "gpu" or "cpu"
    memory_bytes: int
    memory_source: str
    flops_per_second: Mapping[str, float]
    memory_bytes_per_second: float
    compute_capability: str | None = None  # "9.0" = Hopper; None where it has no meaning
    host_link: HostLink | None = None  # of processor and device in one package; None = PCI Express


@dataclass(frozen=True)
class Site:
    """What jobs need at a site beside the machines, said once in its profile."""

    gpu_type: str | None = None  # as SLURM has it; None = any
    srun: Mapping[str, str | int | bool] = field(default_factory=dict)  # srun options of this site
    mpi: str | None = None  # srun's --mpi; None = the site's default
    exclude: tuple[str, ...] = ()  # host lists of nodes no job gets
    restart_by: str | None = None  # "requeue" or "chain" where the recipe does not say; None = requeue
    modules: tuple[str, ...] = ()  # of the environment, loaded first
    setup: tuple[str, ...] = ()  # shell lines, trusted code of the site
    container_runtime: str | None = None  # "pyxis", "apptainer" or "none"; None = pyxis
    container_mounts: tuple[str, ...] = ()  # src:dst[:flags] of every container


@dataclass(frozen=True)
class Cluster:
    """`devices_per_node` accelerators in each node; `nvlink_domain_devices` of them share NVLink
    (more than a node's where a rack is one domain). With `node_mesh` a node has no switch: each pair of its devices is
    wired with an equal share of the links."""

    name: str
    accelerator: Accelerator
    devices_per_node: int
    host_memory_bytes: int
    nvlink_domain_devices: int
    node_link: Link
    domain_link: Link
    fabric_link: Link
    cpus_per_node: int | None = None
    slurm: Mapping[str, str | int | bool] = field(default_factory=dict)  # sbatch defaults of this site
    gpu_request: str = "gpus-per-node"  # or "gres", "gpus-per-task", "none"
    environment: Mapping[str, str] = field(default_factory=dict)
    nodes_per_switch: int | None = None  # under one leaf switch; None = SLURM knows no tree, or nobody said
    nodes_per_block: int | None = None  # of one block of topology/block
    bandwidth: BandwidthMatrix | None = None  # measured between every two nodes
    node_mesh: bool = False
    site: Site = Site()
    network: MeasuredNetwork | None = field(default=None, compare=False)  # of `bandwidth`, between the nodes of one job

    def between(self, nodes: int, order: Sequence[int] | None = None) -> Cluster:
        """The same with the network between so many nodes of the measured matrix, if there is one: what a job on them
        is timed with. `order` as `measured_network` takes it."""
        if self.bandwidth is None or nodes < 2:
            return self
        from llmlaunch.cluster.measured_network import measured_network  # loads NumPy

        return replace(self, network=measured_network(self.bandwidth, nodes, self.devices_per_node, order))
