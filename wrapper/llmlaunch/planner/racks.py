"""Racks that are one NVLink domain of several nodes: which groups of a layout are priced inside one, and what SLURM has
to be asked for so that they are."""

from __future__ import annotations

from llmlaunch.cluster.profile import Cluster
from llmlaunch.layout import Layout


def group_nodes(cluster: Cluster, layout: Layout) -> int:
    """Return the nodes of the widest group of tensor or expert ranks that exchanges over NVLink beyond a node; 1 where
    there is none."""
    widths = (layout.tensor, layout.expert * layout.expert_tensor)
    inside = [width for width in widths if cluster.devices_per_node < width <= cluster.nvlink_domain_devices]
    return -(-max(inside, default=1) // cluster.devices_per_node)


def segment_nodes(nodes: int, nodes_per_block: int, group: int) -> int:
    """Return the largest segment that divides a job's nodes, fits a block and cuts no group of so many nodes; where no
    segment cuts none, the largest."""
    sizes = [size for size in range(1, min(nodes, nodes_per_block) + 1) if nodes % size == 0]
    return max([size for size in sizes if size % group == 0] or sizes)


def rack_note(cluster: Cluster, nodes: int, layout: Layout) -> tuple[str, ...]:
    """Return one sentence where the step time holds only if SLURM gives whole parts of a rack, and nothing asks for
    them or no part holds whole groups."""
    group, rack = group_nodes(cluster, layout), cluster.nvlink_domain_devices // cluster.devices_per_node
    if group == 1 or nodes <= rack:
        return ()
    width = group * cluster.devices_per_node
    priced = f"groups of {width} devices are priced inside one rack of {cluster.nvlink_domain_devices}"
    if cluster.nodes_per_block is None:
        size = segment_nodes(nodes, rack, group)
        return (
            f"{priced}: where SLURM knows the racks (topology/block), write nodes_per_block: {rack} in the profile, "
            f"which asks for segments of {size} nodes; elsewhere a group may lie across two racks and take longer",
        )
    if segment_nodes(nodes, cluster.nodes_per_block, group) % group:
        return (
            f"{priced}, but {nodes} nodes are no whole segments of {group} nodes or a multiple within a block of "
            f"{cluster.nodes_per_block}: some lie across two and take longer; choose a multiple of {group} nodes",
        )
    return ()
