"""placement.json: what `node.pyz place` needs to choose the order of the nodes when SLURM has named them."""

from __future__ import annotations

import json
from dataclasses import asdict

from llmlaunch.backends.registry import backend_for
from llmlaunch.layout import Layout
from llmlaunch.planner.placement import layout_sizes, step_volumes
from llmlaunch.recipe.types import Recipe

__all__ = ["is_placed", "placement_json"]


def is_placed(recipe: Recipe) -> bool:
    """Whether the job chooses the order of its nodes."""
    return recipe.placement == "auto" and recipe.nodes > 1


def placement_json(recipe: Recipe, layout: Layout) -> bytes:
    """The file (docs/run-directory.md), a row of the matrix on a line."""
    cluster = recipe.cluster
    volumes = step_volumes(recipe, layout, backend_for(recipe).facts(recipe))
    described = {
        "schema": 1,
        "nodes": recipe.nodes,
        "devices_per_node": cluster.devices_per_node,
        "nvlink_domain_devices": cluster.nvlink_domain_devices,
        "layout": asdict(layout_sizes(layout)),
        "bytes": asdict(volumes),
        "fabric_gigabytes_per_second": cluster.fabric_link.bytes_per_second / 1e9,
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in described.items()]
    return ("{\n" + ",\n".join([*lines, f' "matrix": {_matrix(recipe)}']) + "\n}\n").encode()


def _matrix(recipe: Recipe) -> str:
    matrix = recipe.cluster.bandwidth
    if matrix is None:
        return "null"
    rows = ",\n".join(
        "   " + json.dumps([float(f"{speed / 1e9:.6g}") for speed in row]) for row in matrix.bytes_per_second
    )
    return f'{{"nodes": {json.dumps(matrix.nodes)},\n  "gigabytes_per_second": [\n{rows}\n  ]}}'
