"""What a plan assumes of the link between device and host, where a technique moves something over it."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.layout import RECOMPUTE_NONE, Layout, LayoutColumns
from llmlaunch.memory.activations import kept_by_layer
from llmlaunch.memory.job import Job, candidate_ranks
from llmlaunch.recipe.types import Recipe
from llmlaunch.timing.host import host_link
from llmlaunch.timing.split import split_of
from llmlaunch.timing.stages import pieces

__all__ = ["host_link_said"]


def host_link_said(recipe: Recipe, job: Job, layout: Layout) -> tuple[str, ...]:
    """One sentence for each thing the figures take for granted."""
    if not (job.techniques.moves_to_host or layout.offload_layers):
        return ()
    name, carried = host_link(recipe.cluster)
    said = [
        f"what waits in host memory travels over {name} with 16 lanes, {carried / 1e9:.1f} GB/s each way at best; "
        "the step time shows what no computation hides"
    ]
    if job.techniques.swapped_share:
        said.append(_swap_said(recipe, job, layout))
    return tuple(said)


def _swap_said(recipe: Recipe, job: Job, layout: Layout) -> str:
    """Swapping is hidden where a layer's share travels no longer than the layer computes (MEMO, Zhao et al. 2025,
    section 4.1)."""
    columns = LayoutColumns.of([replace(layout, recompute=RECOMPUTE_NONE)])
    dense, mixture = kept_by_layer(job, candidate_ranks(job, columns))
    layer_bytes = float(max(dense[0], mixture[0]))
    layers = pieces(job, recipe.cluster, split_of(job, columns))
    seconds = max(float(layer.forward[0]) for layer in (layers.dense, layers.mixture) if layer is not None)
    needed = job.techniques.swapped_share * layer_bytes / seconds
    name, carried = host_link(recipe.cluster)
    holds = "it is hidden" if needed <= carried else "it is not hidden"
    return (
        f"swapping {job.techniques.swapped_share:.0%} of a layer's {layer_bytes / 2**30:.2f} GiB while the layer "
        f"computes ({seconds * 1e3:.1f} ms) needs {needed / 1e9:.0f} GB/s, and 16 lanes of {name} carry "
        f"{carried / 1e9:.1f} GB/s at best; {holds}"
    )
