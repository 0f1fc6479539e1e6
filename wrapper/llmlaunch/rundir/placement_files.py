"""The schemas of what orders the nodes of a job (docs/run-files.md, docs/placement.md)."""

from __future__ import annotations

from typing import TypedDict

from .schema import Amount, Count, Host, Seconds, Volume


class LayoutSizes(TypedDict, total=False):
    """Sizes of the parallel groups."""

    tensor: Count
    """tensor parallel"""
    context: Count
    """context parallel"""
    data: Count
    """data parallel"""
    pipeline: Count
    """pipeline parallel"""
    virtual_pipeline: Count
    """chunks of a stage"""
    expert: Count
    """expert parallel"""
    expert_tensor: Count
    """tensor parallel within an expert"""


class StepBytes(TypedDict, total=False):
    """What one device sends in one step ([placement.md](placement.md))."""

    pipeline: Volume
    """to the next stage"""
    data: list[Volume]
    """for gradients and parameters, per stage"""
    expert_data: list[Volume]
    """the same for experts, per stage"""
    expert: Volume
    """of tokens to experts"""


class NodeBandwidths(TypedDict, total=False):
    """Measured bandwidth between nodes."""

    nodes: list[Host]
    """names of the rows and columns"""
    gigabytes_per_second: list[list[Amount]]
    """from the row's node to the column's"""


class PlacementFile(TypedDict, total=False):
    """What the job needs to order its nodes."""

    schema: int
    """1"""
    nodes: Count
    """that train"""
    devices_per_node: Count
    """ranks of each"""
    nvlink_domain_devices: Count | None
    """devices that NVLink joins, over nodes"""
    layout: LayoutSizes
    """sizes of the parallel groups"""
    bytes: StepBytes
    """what one device sends in one step"""
    fabric_gigabytes_per_second: Amount
    """of the network, per device"""
    matrix: NodeBandwidths | None
    """null if nothing was measured"""


class NodeOrder(TypedDict, total=False):
    """The order in which an attempt uses its nodes."""

    order: list[Host]
    """names by node rank"""
    source: str
    """`matrix`, `topology` or `slurm`"""
    seconds: Seconds
    """of a step, between nodes; this key and those below are absent without a source"""
    slurm_order_seconds: Seconds
    """the same in SLURM's order"""
    terms: dict[str, Seconds]
    """`seconds` by term"""
    slurm_order_terms: dict[str, Seconds]
    """the same in SLURM's order"""
    proved: bool
    """no order is better"""
    why: str
    """in words"""
