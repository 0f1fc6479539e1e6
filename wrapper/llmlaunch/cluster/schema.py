"""How a cluster is written: in a profile under slurm/clusters/, in a file of the site, or inline in a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

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
from llmlaunch.documents.validate import StrictModel

__all__ = ["AcceleratorFile", "ClusterFile", "LinkFile", "LinksFile", "SiteContainerFile", "inline_or_name"]

Speed = Annotated[float, Field(gt=0, le=1e9)]


def inline_or_name(value: object) -> str:
    """The branch of a "name or mapping" field."""
    return "(inline)" if isinstance(value, dict) else "(name)"


class LinkFile(StrictModel):
    """One tier of the network, per device and direction."""

    gigabytes_per_second: Speed | None = Field(None, description="Bandwidth in units of 1e9 bytes")
    latency_microseconds: Annotated[float, Field(ge=0, le=1e9)] | None = Field(None, description="Latency")
    measured: bool = Field(False, description="Measured here, not taken from a data sheet")


class LinksFile(StrictModel):
    """The three tiers."""

    node: LinkFile | None = Field(None, description="Between devices of a node")
    domain: LinkFile | None = Field(None, description="Between devices of an NVLink domain; absent = as `node`")
    fabric: LinkFile | None = Field(None, description="Between nodes")
    matrix: PathText | None = Field(
        None, description="File of measured speeds between every two nodes, as llmlaunch doctor --network saves it"
    )


class AcceleratorFile(StrictModel):
    """A device. With `base`, only what differs from it."""

    base: Line | None = Field(None, description="Known accelerator it starts from")
    name: Name | None = Field(None, description="Name in reports")
    kind: Literal["gpu", "cpu"] | None = Field(None, description="Kind of device")
    memory_gib: Annotated[float, Field(gt=0, le=2**20)] | None = Field(
        None, description="Memory in units of 2**30 bytes, as torch reports total_memory (cpu: per process)"
    )
    bf16_tflops: Speed | None = Field(None, description="Dense peak in bf16, 1e12 operations a second")
    fp16_tflops: Speed | None = Field(None, description="Dense peak in fp16")
    fp8_tflops: Speed | None = Field(None, description="Dense peak in fp8")
    tf32_tflops: Speed | None = Field(None, description="Dense peak in tf32")
    fp32_tflops: Speed | None = Field(None, description="Peak in fp32 without tensor cores")
    memory_gigabytes_per_second: Speed | None = Field(None, description="Memory bandwidth in 1e9 bytes a second")
    compute_capability: CudaCapability | None = Field(None, description="CUDA compute capability, quoted")


class SiteContainerFile(StrictModel):
    """Containers at this site."""

    runtime: Literal["pyxis", "apptainer", "none"] | None = Field(
        None, description="What runs them; none = nothing does; absent = pyxis"
    )
    mounts: list[Mount] | None = Field(
        None, description="/source:/destination[:flags] that every container of this site gets"
    )


class ClusterFile(StrictModel):
    """A cluster. With `base`, only what differs from it."""

    base: Line | None = Field(None, description="Profile, by name or path, this one starts from")
    name: Name | None = Field(None, description="Name in reports")
    accelerator: (
        Annotated[
            Annotated[str, Tag("(name)")] | Annotated[AcceleratorFile, Tag("(inline)")], Discriminator(inline_or_name)
        ]
        | None
    ) = Field(None, description="Known accelerator by name, or a mapping")
    devices_per_node: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="Accelerators of a node (cpu: processes)"
    )
    host_memory_gib: Annotated[float, Field(gt=0, le=2**24)] | None = Field(
        None, description="Main memory of a node in units of 2**30 bytes"
    )
    cpus_per_node: Annotated[int, Field(ge=1, le=2**16)] | None = Field(
        None, description="CPUs of a node as SLURM counts them; absent = not known"
    )
    nvlink_domain_devices: Annotated[int, Field(ge=1, le=2**16)] | None = Field(
        None, description="Devices that share NVLink; absent = those of a node"
    )
    nodes_per_switch: Annotated[int, Field(ge=1, le=2**16)] | None = Field(
        None, description="Nodes under one leaf switch, where SLURM knows the tree of switches: asks for few switches"
    )
    nodes_per_block: Annotated[int, Field(ge=1, le=2**16)] | None = Field(
        None, description="Nodes of one block of SLURM's topology/block plugin: asks for segments that fit blocks"
    )
    node_mesh: bool | None = Field(
        None, description="Devices of a node are wired pair by pair, without a switch (boards of four GPUs)"
    )
    links: LinksFile | None = Field(None, description="Speeds of the network")
    gpu_request: Literal["gpus-per-node", "gres", "gpus-per-task", "none"] | None = Field(
        None, description="How GPUs are asked for at this site"
    )
    gpu_type: GpuType | None = Field(
        None, description="Type of the GPUs as SLURM has it, asked for by name; absent = any type"
    )
    slurm: SlurmOptions | None = Field(
        None, description="sbatch options of this site (partition, account, mem, exclusive ...); a recipe's win"
    )
    slurm_plugins: PluginOptions | None = Field(
        None, description="Options that plugins of this site (SPANK) add to sbatch; a recipe's win"
    )
    srun: dict[SrunOption, SrunValue] | None = Field(None, description="srun options of this site")
    mpi: MpiType | None = Field(None, description="--mpi of srun; absent = the site's own default")
    exclude: list[HostList] | None = Field(None, description="Nodes no job gets, as SLURM writes them")
    restart_by: Literal["requeue", "chain"] | None = Field(
        None, description="How jobs come back here where the recipe does not say; absent = requeue"
    )
    setup: list[SetupLine] | None = Field(
        None, description="Shell lines run first on the batch host, before modules are loaded; they are run as they are"
    )
    modules: list[ModuleName] | None = Field(
        None, description="Environment modules loaded next, before the setup lines of the recipe"
    )
    container: SiteContainerFile | None = Field(None, description="Containers at this site")
    environment: dict[EnvironmentName, EnvironmentValue] | None = Field(
        None, description="Variables exported to the trainers at this site"
    )
    not_secrets: list[Line] | None = Field(
        None, description="Keys of this profile whose values look like secrets and are none"
    )
