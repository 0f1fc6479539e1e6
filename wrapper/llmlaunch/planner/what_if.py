"""What-ifs of a plan: what each technique that no backend runs costs in memory and gains in time, with the layout that
was chosen; and MEMO's share of swapped activations, solved where the recipe leaves it open."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llmlaunch.layout import RECOMPUTE_NONE, Layout, LayoutColumns
from llmlaunch.memory.activations import kept_by_layer
from llmlaunch.memory.estimator import candidate_ranks, estimate
from llmlaunch.memory.job import Job
from llmlaunch.planner.headroom import search_with_headroom
from llmlaunch.planner.plan import WhatIf
from llmlaunch.planner.setting import Setting, node_of
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import Techniques
from llmlaunch.timing.network import host_link, host_link_bytes_per_second
from llmlaunch.timing.products import split_of
from llmlaunch.timing.stages import pieces
from llmlaunch.timing.step import step_time
from llmlaunch.units import GB, GIB

ROUNDS = 4  # of solving the share for a layout and searching with it
SHARE_STEP = 1e-3


def what_ifs_of(setting: Setting, planned: Recipe, layout: Layout, pace: float = 1.0) -> tuple[WhatIf, ...]:
    """Return what each what-if of a planned recipe changes of its layout, the others as they are. Step times are `pace`
    times those that are predicted."""
    job, columns = setting.job_of(planned), LayoutColumns.of([layout])
    neutral = Techniques()

    def sides(job: Job) -> tuple[int, int, float]:
        detail = estimate(job, layout, node=node_of(planned))
        seconds = pace * float(step_time(job, setting.cluster, columns).total[0])
        return detail.worst.device_bytes, detail.host_bytes_per_node or 0, seconds

    changes = []
    for name in planned.techniques.what_ifs:
        without = replace(job, techniques=replace(job.techniques, **{name: getattr(neutral, name)}))
        device, host, seconds = (a - b for a, b in zip(sides(job), sides(without), strict=True))
        changes.append(WhatIf(f"what_if.{name}", getattr(job.techniques, name), int(device), int(host), float(seconds)))
    return tuple(changes)


def with_solved_share(setting: Setting) -> Setting:
    """Return the setting with `what_if.swapped_share: auto` solved for the layout that it would choose: the largest
    share that the link carries while a layer computes, and that host memory holds (MEMO, Zhao et al. 2025, section
    4.2). What is recomputed besides makes a layer slower in its backward pass alone, so the share hardly depends on
    the layout, and a few rounds settle it."""
    recipe, share = setting.recipe, 1.0
    for _ in range(ROUNDS):
        solved = setting.with_recipe(replace(recipe, techniques=replace(recipe.techniques, swapped_share=share)))
        result = search_with_headroom(solved)
        if not len(result.points):
            break
        layout = result.candidate(solved.recipe, 0).layout
        settled = swapped_share_of(solved, layout)
        if abs(settled - share) < SHARE_STEP:
            break
        share = settled
    return solved


def swapped_share_of(setting: Setting, layout: Layout) -> float:
    """Return the share that link and host memory allow a layout, a whole number of thousandths."""
    link, host = _share_of_link(setting.job, setting, layout), _share_of_host(setting, layout)
    return float(np.floor(min(max(min(link, host), 0.0), 1.0) / SHARE_STEP) * SHARE_STEP)


def _share_of_link(job: Job, setting: Setting, layout: Layout) -> float:
    """Return the share of each layer's tokens whose activations travel while the layer runs forward."""
    shares = []
    for whole, saved, seconds in _layers(job, setting, layout):
        carried = seconds * host_link_bytes_per_second(setting.cluster)
        shares.append((carried - whole) / (saved - whole) if saved > whole else 1.0)
    return min(shares)


def _layers(job: Job, setting: Setting, layout: Layout) -> list[tuple[float, float, float]]:
    """Return of a layer of each kind the bytes of one micro-batch that are swapped whatever the share, all that it
    saves, and its forward seconds."""
    columns = LayoutColumns.of([replace(layout, recompute=RECOMPUTE_NONE)])
    nothing = replace(job, techniques=replace(job.techniques, swapped_share=0.0))
    rows = candidate_ranks(nothing, columns)
    layers = pieces(nothing, setting.cluster, split_of(nothing, columns)).layers
    from llmlaunch.effects.swap import swapped_by_layer

    sizes = zip(swapped_by_layer(nothing, rows), kept_by_layer(nothing, rows), layers, strict=True)
    return [(float(whole[0]), float(saved[0]), float(layer.forward[0])) for whole, saved, layer in sizes]


def _share_of_host(setting: Setting, layout: Layout) -> float:
    """Return the share with which a node is as full as it may be. Host bytes grow evenly with the share."""
    least, most = (_host_bytes(setting, layout, share) for share in (0.001, 1.0))
    if most <= setting.host_limit.limit_bytes or most <= least:
        return 1.0
    return (setting.host_limit.limit_bytes - least) / (most - least)


def _host_bytes(setting: Setting, layout: Layout, share: float) -> int:
    job = replace(setting.job, techniques=replace(setting.job.techniques, swapped_share=share))
    return estimate(job, layout, node=node_of(setting.recipe)).host_bytes_per_node or 0


def swap_note(setting: Setting, job: Job, layout: Layout) -> str:
    """Return whether swapping is hidden, which it is where a layer's share travels no longer than the layer computes
    (MEMO, Zhao et al. 2025, section 4.1)."""
    share = job.techniques.swapped_share
    whole, saved, seconds = max(_layers(job, setting, layout), key=lambda layer: layer[1] / layer[2])
    swapped = whole + share * (saved - whole)
    needed, shared = swapped / seconds, host_link_bytes_per_second(setting.cluster)
    hidden = "it is hidden" if needed <= shared * (1.0 + SHARE_STEP) else "it is not hidden"
    return (
        f"swapping {swapped / GIB:.2f} of a layer's {saved / GIB:.2f} GiB (share {share:g}) while the layer computes "
        f"({seconds * 1e3:.1f} ms) needs {needed / GB:.0f} GB/s of the {shared / GB:.1f} that "
        f"{host_link(setting.cluster).name} can carry; {hidden}"
    )
