"""The schemas for the order of a job's nodes (docs/run-files.md, docs/placement.md)."""

from __future__ import annotations

from typing import TypedDict

from .schema import Amount, Count, Host, Seconds, Volume


class LayoutSizes(TypedDict, total=False):
    """Sizes of the parallel groups."""

    tensor: Count
    """tensor-parallel size"""
    context: Count
    """context-parallel size"""
    data: Count
    """data-parallel size"""
    pipeline: Count
    """pipeline-parallel size"""
    virtual_pipeline: Count
    """number of chunks per pipeline stage"""
    expert: Count
    """expert-parallel size"""
    expert_tensor: Count
    """tensor-parallel size within an expert"""


class StepBytes(TypedDict, total=False):
    """What one device sends in one step ([placement.md](placement.md))."""

    pipeline: Volume
    """bytes sent to the next pipeline stage"""
    data: list[Volume]
    """bytes sent to reduce gradients and gather parameters, for each stage"""
    expert_data: list[Volume]
    """bytes sent to reduce gradients and gather parameters of experts, for each stage"""
    expert: Volume
    """bytes of tokens sent to each other rank of the expert group"""


class NodeBandwidths(TypedDict, total=False):
    """Measured bandwidth between nodes."""

    nodes: list[Host]
    """nodes in the order of the rows and columns"""
    gigabytes_per_second: list[list[Amount]]
    """bandwidth from the node of the row to the node of the column"""


class PlacementFile(TypedDict, total=False):
    """What the job needs to choose the order of its nodes."""

    schema: int
    """version of this format: 1"""
    nodes: Count
    """number of nodes that train"""
    devices_per_node: Count
    """number of ranks on each node"""
    nvlink_domain_devices: Count | None
    """number of devices that one NVLink domain joins across nodes; null if NVLink stays within a node"""
    layout: LayoutSizes
    """sizes of the parallel groups"""
    bytes: StepBytes
    """what one device sends in one step"""
    fabric_gigabytes_per_second: Amount
    """bandwidth between nodes for each device"""
    matrix: NodeBandwidths | None
    """measured bandwidth between nodes; null if it was not measured"""


class NodeOrder(TypedDict, total=False):
    """The order in which an attempt uses its nodes."""

    order: list[Host]
    """nodes in the order of their node ranks"""
    source: str
    """what the order was chosen by: `matrix`, `topology` or, if it is unchanged, `slurm`"""
    seconds: Seconds
    """predicted seconds that one step spends on traffic between nodes; absent if `source` is `slurm`"""
    slurm_order_seconds: Seconds
    """`seconds` in SLURM's order of the nodes; absent if `source` is `slurm`"""
    terms: dict[str, Seconds]
    """`seconds` by kind of traffic; absent if `source` is `slurm`"""
    slurm_order_terms: dict[str, Seconds]
    """`slurm_order_seconds` by kind of traffic; absent if `source` is `slurm`"""
    proved: bool
    """whether it is proved that no order is better; absent if `source` is `slurm`"""
    why: str
    """reason for the order, in words"""
