"""The machine: accelerators, nodes, the three network tiers and the site, and the keys of a cluster profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from llmlaunch.documents.keys import form, key, keys_of, name_or_mapping, section
from llmlaunch.documents.text import (
    CudaCapability,
    EnvironmentName,
    EnvironmentValue,
    GpuType,
    HostList,
    Line,
    ModuleName,
    Mount,
    MpiType,
    Name,
    PathText,
    PluginOptions,
    SetupLine,
    SlurmOptions,
    SrunOption,
    SrunValue,
)
from llmlaunch.frozen import frozen

if TYPE_CHECKING:
    from llmlaunch.cluster.matrix import BandwidthMatrix, MeasuredNetwork


Nodes = Annotated[int, Field(ge=1, le=2**16)]
Speed = Annotated[float, Field(gt=0, le=1e9)]


@frozen
class Link:
    """One tier of the network, per device and direction."""

    bytes_per_second: float
    latency_seconds: float
    measured: bool = False


@frozen
class HostLink:
    """The link between a device and its node's memory: nominal bytes a second in each direction, and what that memory
    carries for each device while all devices of the node use it.
    """

    name: str
    bytes_per_second: float
    memory_bytes_per_second: float


@section
class SiteContainer:
    """Containers at this site."""

    runtime: str | None = key(
        "What runs them; none = nothing does; absent = pyxis",
        default=None,
        written=Literal["pyxis", "apptainer", "none"] | None,
    )
    mounts: tuple[Mount, ...] = key(
        "/source:/destination[:flags] that every container of this site gets",
        default=(),
        written=tuple[Mount, ...] | None,
    )


@frozen
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
    platform: str = "cuda"  # what programs it: "rocm" for AMD's

    @property
    def peak_kind(self) -> str:
        """What is measured of a rank's memory, and predicted: "device", or "resident" where there is no GPU."""
        return "device" if self.kind == "gpu" else "resident"


@section
class Site:
    """What jobs need at a site beside the machines, written once in its profile."""

    gpu_type: GpuType | None = key(
        "Type of the GPUs as SLURM has it, asked for by name; absent = any type", default=None
    )
    srun: Mapping[str, str | int | bool] = key(
        "srun options of this site", default={}, written=dict[SrunOption, SrunValue]
    )
    mpi: MpiType | None = key("--mpi of srun; absent = the site's own default", default=None)
    exclude: tuple[HostList, ...] = key("Nodes no job gets, as SLURM writes them", default=())
    restart_by: str | None = key(
        "How jobs come back here where the recipe does not say; absent = requeue",
        default=None,
        written=Literal["requeue", "chain"] | None,
    )
    usd_per_gpu_hour: float | None = key(
        "Price of an hour of one device, in US dollars (`llmlaunch compare`); absent = not known",
        default=None,
        ge=0,
        le=1e6,
    )
    checkpoint_gigabytes_per_second: Speed | None = key(
        "What the file system takes of a checkpoint from all nodes, in 1e9 bytes a second; absent = as is usual for as "
        "many nodes",
        default=None,
    )
    resume_seconds: float | None = key(
        "From a stop of a job to its first new step, the queue left out; absent = derived", default=None, ge=0, le=1e6
    )
    setup: tuple[SetupLine, ...] = key(
        "Shell lines run first on the batch host, before modules are loaded; they are run as they are", default=()
    )
    modules: tuple[ModuleName, ...] = key(
        "Environment modules loaded next, before the setup lines of the recipe", default=()
    )
    container: SiteContainer = key("Containers at this site", default=SiteContainer())


@section
class Cluster:
    """`devices_per_node` accelerators in each node; `nvlink_domain_devices` of them share NVLink
    (more than a node's where a rack is one domain). With `node_mesh` a node has no switch: each pair of its devices is
    wired with an equal share of the links."""

    name: Name = key("Name in reports")
    accelerator: Accelerator
    devices_per_node: int = key("Accelerators of a node (cpu: processes)", ge=1, le=1024)
    host_memory_bytes: int
    nvlink_domain_devices: Nodes = key("Devices that share NVLink; absent = those of a node")
    node_link: Link
    domain_link: Link
    fabric_link: Link
    cpus_per_node: Nodes | None = key("CPUs of a node as SLURM counts them; absent = not known", default=None)
    slurm: Mapping[str, str | int | bool] = key(
        "sbatch options of this site (partition, account, mem, exclusive ...); a recipe's win",
        default={},
        written=SlurmOptions,
    )
    gpu_request: str = key(
        "How GPUs are asked for at this site",
        default="gpus-per-node",
        written=Literal["gpus-per-node", "gres", "gpus-per-task", "none"] | None,
    )
    environment: Mapping[str, str] = key(
        "Variables exported to the trainers at this site",
        default={},
        written=dict[EnvironmentName, EnvironmentValue],
    )
    nodes_per_switch: Nodes | None = key(
        "Nodes under one leaf switch, where SLURM knows the tree of switches: asks for few switches", default=None
    )
    nodes_per_block: Nodes | None = key(
        "Nodes of one block of SLURM's topology/block plugin: asks for segments that fit blocks", default=None
    )
    bandwidth: BandwidthMatrix | None = None  # measured between every two nodes
    node_mesh: bool = key(
        "Devices of a node are wired pair by pair, without a switch (boards of four GPUs)", default=False
    )
    devices_per_uplink: int = key(
        "Devices that share one PCI Express link to the processors; absent = each has its own", default=1, ge=1, le=64
    )
    desktop_gib: float = key(
        "Memory of each device that a screen and other people's programs hold, in units of 2**30 bytes",
        default=0.0,
        ge=0,
        le=1024,
    )
    host_copy_bytes_per_second: float | None = None  # of each device, each way, all at once, as measured; None = nobody
    site: Site = Site()
    network: MeasuredNetwork | None = field(default=None, compare=False)  # of `bandwidth`, between the nodes of one job
    host_seconds_factor: float = field(default=1.0, compare=False)  # of what hosts take, by measured runs

    def between(self, nodes: int, order: Sequence[int] | None = None) -> Cluster:
        """Return the cluster with the measured network between `nodes` nodes, if there is a matrix; step times use it.

        `order` is that of `measured_network`.
        """
        if self.bandwidth is None or nodes < 2:
            return self
        from llmlaunch.cluster.matrix import measured_network  # loads NumPy

        return replace(self, network=measured_network(self.bandwidth, nodes, self.devices_per_node, order))


@section
class _LinkKeys:
    """One tier of the network, per device and direction, as it is written: in the units of data sheets."""

    gigabytes_per_second: Speed = key("Bandwidth in units of 1e9 bytes")
    latency_microseconds: float = key("Latency", ge=0, le=1e9)
    measured: bool = key("Measured here, not taken from a data sheet", default=False)


@section
class _HostLinkKeys:
    """Copies between a device and its node's memory, as NVIDIA's nvbandwidth measures them."""

    gigabytes_per_second: Speed = key(
        "What each device copies in the slower direction while all devices of the node copy, in units of 1e9 bytes"
    )


@section
class _LinksKeys:
    """The three tiers, and the way to the host."""

    node: _LinkKeys = key("Between devices of a node")
    domain: _LinkKeys = key("Between devices of an NVLink domain; absent = as `node`")
    fabric: _LinkKeys = key("Between nodes")
    host: _HostLinkKeys = key("Between a device and its node's memory; absent = as the accelerator's data sheet has it")
    matrix: PathText = key("File of measured speeds between every two nodes, as llmlaunch doctor --network saves it")


@section
class _AcceleratorKeys:
    """A device. With `base`, only what differs from it."""

    base: Line = key("Known accelerator it starts from")
    name: Name = key("Name in reports")
    kind: str = key("Kind of device", written=Literal["gpu", "cpu"])
    memory_gib: float = key(
        "Memory in units of 2**30 bytes, as torch reports total_memory (cpu: per process)", gt=0, le=2**20
    )
    bf16_tflops: Speed = key("Dense peak in bf16, 1e12 operations a second")
    fp16_tflops: Speed = key("Dense peak in fp16")
    fp8_tflops: Speed = key("Dense peak in fp8")
    tf32_tflops: Speed = key("Dense peak in tf32")
    fp32_tflops: Speed = key("Peak in fp32 without tensor cores")
    memory_gigabytes_per_second: Speed = key("Memory bandwidth in 1e9 bytes a second")
    compute_capability: CudaCapability = key("CUDA compute capability, quoted")


@section
class _ProfileKeys:
    """The keys of a profile that are not, as they are written, fields of `Cluster` or `Site`."""

    base: Line = key("Profile, by name or path, this one starts from")
    accelerator: Any = key(
        "Known accelerator by name, or a mapping",
        written=lambda: _accelerator_form(),
    )
    host_memory_gib: float = key("Main memory of a node in units of 2**30 bytes", gt=0, le=2**24)
    links: Any = key("Speeds of the network", written=lambda: _links_form())
    slurm_plugins: Any = key(
        "Options that plugins of this site (SPANK) add to sbatch; a recipe's win", written=PluginOptions
    )
    not_secrets: Any = key("Keys of this profile whose values look like secrets and are none", written=list[Line])


@cache
def cluster_form() -> Any:
    """Return the type of a cluster profile, in a file or inline. Over a `base`, only what differs is given."""
    own = keys_of(_ProfileKeys, over_base=True, nullable=True)
    cluster = keys_of(Cluster, over_base=True, nullable=True)
    site = keys_of(Site, over_base=True, nullable=True, written={"container": _over_base(SiteContainer)})
    return form("Cluster", {"base": own["base"], **cluster, **own, **site}, description=Cluster.__doc__)


def _accelerator_form() -> Any:
    return name_or_mapping(str, _over_base(_AcceleratorKeys))


def _links_form() -> Any:
    link = _over_base(_LinkKeys)
    tiers = {"node": link, "domain": link, "fabric": link, "host": _over_base(_HostLinkKeys)}
    keys = keys_of(_LinksKeys, over_base=True, nullable=True, written=tiers)
    return form("Links", keys, description=_LinksKeys.__doc__)


@cache
def _over_base(cls: type[Any]) -> Any:
    keys = keys_of(cls, over_base=True)
    return form(cls.__name__.strip("_").removesuffix("Keys"), keys, description=cls.__doc__)
