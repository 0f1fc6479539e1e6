"""What a plan assumes of the link between device and host, where a technique moves something over it."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.layout import RECOMPUTE_NONE, Layout, LayoutColumns
from llmlaunch.memory.activations import kept_by_layer, swapped_bytes
from llmlaunch.memory.job import Job, candidate_ranks
from llmlaunch.recipe.types import Recipe
from llmlaunch.timing.host import host_link, host_link_bytes_per_second
from llmlaunch.timing.split import split_of
from llmlaunch.timing.stages import pieces

__all__ = ["host_link_said"]


def host_link_said(recipe: Recipe, job: Job, layout: Layout) -> tuple[str, ...]:
    """One sentence for each thing the figures take for granted."""
    if not (job.techniques.moves_to_host or layout.offload_layers):
        return ()
    link, carried = host_link(recipe.cluster), host_link_bytes_per_second(recipe.cluster)
    said = [
        f"what waits in host memory travels over {link.name}, {link.bytes_per_second / 1e9:.1f} GB/s each way at best "
        f"and {carried / 1e9:.1f} GB/s with all devices of a node; the step time shows what no computation hides"
    ]
    if job.techniques.swapped_share:
        said.append(_swap_said(recipe, job, layout))
    return tuple(said)


def _swap_said(recipe: Recipe, job: Job, layout: Layout) -> str:
    """Swapping is hidden where a layer's share travels no longer than the layer computes (MEMO, Zhao et al. 2025,
    section 4.1)."""
    columns = LayoutColumns.of([replace(layout, recompute=RECOMPUTE_NONE)])
    rows = candidate_ranks(job, columns)
    dense, mixture = kept_by_layer(job, rows)
    layer_bytes, swapped = max((float(kept[0]), float(swapped_bytes(job, rows, kept)[0])) for kept in (dense, mixture))
    layers = pieces(job, recipe.cluster, split_of(job, columns))
    seconds = max(float(layer.forward[0]) for layer in (layers.dense, layers.mixture) if layer is not None)
    needed = swapped / seconds
    name, carried = host_link(recipe.cluster).name, host_link_bytes_per_second(recipe.cluster)
    holds = "it is hidden" if needed <= carried else "it is not hidden"
    return (
        f"swapping {swapped / 2**30:.2f} of a layer's {layer_bytes / 2**30:.2f} GiB while the layer computes "
        f"({seconds * 1e3:.1f} ms) needs {needed / 1e9:.0f} GB/s of the {carried / 1e9:.1f} that {name} can carry; "
        f"{holds}"
    )
