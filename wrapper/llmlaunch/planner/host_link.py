"""What a plan assumes of the link between device and host, where a technique moves something over it."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.layout import RECOMPUTE_NONE, Layout, LayoutColumns
from llmlaunch.memory.activations import kept_by_layer
from llmlaunch.memory.job import Job, candidate_ranks
from llmlaunch.recipe.types import Recipe
from llmlaunch.timing.step import layer_forward_seconds

__all__ = ["host_link_said"]

HOPPER = 9.0
# Nominal bytes a second of 16 lanes, one direction (PCI Express Base Specification: 16 and 32 GT/s, 128b/130b).
PCIE_4, PCIE_5 = 31.5e9, 63.0e9


def host_link_said(recipe: Recipe, job: Job, layout: Layout) -> tuple[str, ...]:
    """One sentence for each thing the figures take for granted."""
    if not job.techniques.moves_to_host:
        return ()
    said = ["the step time leaves out what transfers to and from host memory cost"]
    if job.techniques.swapped_share:
        said.append(_swap_said(recipe, job, layout))
    return tuple(said)


def _swap_said(recipe: Recipe, job: Job, layout: Layout) -> str:
    """Swapping is hidden where a layer's share travels no longer than the layer computes (MEMO, Zhao et al. 2025,
    section 4.1)."""
    columns = LayoutColumns.of([replace(layout, recompute=RECOMPUTE_NONE)])
    dense, mixture = kept_by_layer(job, candidate_ranks(job, columns))
    layer_bytes = float(max(dense[0], mixture[0]))
    seconds = float(layer_forward_seconds(recipe.model, recipe.workload, recipe.cluster, columns)[0])
    needed = job.techniques.swapped_share * layer_bytes / seconds
    capability = recipe.cluster.accelerator.compute_capability
    newer = capability is not None and float(capability) >= HOPPER
    name, carried = ("PCIe 5.0", PCIE_5) if newer else ("PCIe 4.0", PCIE_4)
    holds = "it is hidden" if needed <= carried else "it is not hidden: the step would be slower than shown"
    return (
        f"swapping {job.techniques.swapped_share:.0%} of a layer's {layer_bytes / 2**30:.2f} GiB while the layer "
        f"computes ({seconds * 1e3:.1f} ms) needs {needed / 1e9:.0f} GB/s, and 16 lanes of {name} carry "
        f"{carried / 1e9:.1f} GB/s at best; {holds}"
    )
