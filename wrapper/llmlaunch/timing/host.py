"""The link between a device and its node's memory, and how long what waits there travels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llmlaunch.cluster.profile import Cluster, HostLink
from llmlaunch.columns import FloatColumn
from llmlaunch.layout import RECOMPUTE_FULL, LayoutColumns
from llmlaunch.memory.activations import kept_by_layer, layer_input, swapped_bytes
from llmlaunch.memory.job import Job, candidate_ranks
from llmlaunch.timing.constants import constant

__all__ = ["host_link", "host_link_bytes_per_second", "moves_activations", "moving_seconds"]


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
    """Return the rate of each device's transfers, per direction, while all devices of the node copy: a share of the
    link, and no more than their share of what the node's memory takes."""
    link = host_link(cluster)
    return min(constant("host_link_efficiency") * link.bytes_per_second, link.memory_bytes_per_second)


def moves_activations(job: Job, layouts: LayoutColumns) -> bool:
    """Whether any layout's activations wait in host memory."""
    techniques = job.techniques
    always = techniques.offload_modules or techniques.offload_checkpoints or techniques.swapped_share
    return bool(always) or bool(np.any(layouts.offload_layers))


def moving_seconds(
    job: Job, cluster: Cluster, layouts: LayoutColumns, dense_layers: FloatColumn, mixture_layers: FloatColumn
) -> FloatColumn:
    """Return the seconds that one micro-batch's activations of a stage with so many layers travel to host memory, and
    again back: named modules, the first layers whole, full recompute's layer inputs, or a share of all."""
    techniques = job.techniques
    rows = candidate_ranks(job, layouts)
    first = np.searchsorted(rows.layout_index[np.argsort(rows.layout_index, kind="stable")], np.arange(len(layouts)))
    first = np.argsort(rows.layout_index, kind="stable")[first]  # a row of each layout: layers cost the same on all
    here = replace(job, techniques=replace(techniques, offload_modules=()))
    whole, left = kept_by_layer(here, rows), kept_by_layer(job, rows)
    swapped = [swapped_bytes(job, rows, b) if techniques.swapped_share else 0.0 * b for b in left]
    moved = [(a - b + c)[first] for a, b, c in zip(whole, left, swapped, strict=True)]
    if techniques.offload_checkpoints:
        inputs = layer_input(job, rows)[first]
        moved = [np.where(layouts.recompute == RECOMPUTE_FULL, inputs, column) for column in moved]
    layers = np.maximum(dense_layers + mixture_layers, 1.0)
    share = np.minimum(layouts.offload_layers / layers, 1.0)
    moved = [(1.0 - share) * some + share * one[first] for some, one in zip(moved, left, strict=True)]
    total = dense_layers * moved[0] + mixture_layers * moved[1]
    return np.asarray(total / host_link_bytes_per_second(cluster))
