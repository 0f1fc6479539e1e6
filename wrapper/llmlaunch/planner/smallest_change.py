"""Where nothing is safe: the smallest change of the recipe that would fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from llmlaunch.planner.setting import Setting
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import Techniques

__all__ = ["smallest_change"]

# Tried in this order where nothing is safe. Not powers of two alone: 126 layers want 7 or 9 pipeline stages.
MORE_NODES = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 21, 24, 28, 32, 42, 48, 63, 64)
SHORTER = (2, 4, 8, 16, 32)
NO_OFFLOAD: dict[str, Any] = {
    "offload_optimizer": 0.0,
    "offload_parameters": False,
    "offload_modules": (),
    "offload_checkpoints": False,
}


def smallest_change(setting: Setting) -> str:
    """The first change, smallest first, whose space holds a safe layout."""
    for change, changed in _changes(setting.recipe):
        found = setting.of(changed).search()
        if np.any(found.safe):
            return f"Smallest change that fits: {change} ({found.candidate(changed, 0).layout.describe()})."
    return (
        f"Neither freeing the pins, nor up to {MORE_NODES[-1]} times the nodes, nor a "
        f"{SHORTER[-1]} times shorter sequence would fit."
    )


def _changes(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """One changed recipe after the other: what eases the host, a freed pin, more nodes, a shorter sequence."""
    if recipe.slurm.get("mem") not in (None, False, 0, "0"):
        yield "slurm.mem: 0 (all of the node's memory)", replace(recipe, slurm={**recipe.slurm, "mem": 0})
    for name, off in NO_OFFLOAD.items():
        if getattr(recipe.techniques, name) != off:
            ways: Techniques = replace(recipe.techniques, **{name: off})
            yield f"without layout.{name}", replace(recipe, techniques=ways)
    for name in recipe.pins:
        rest = {k: v for k, v in recipe.pins.items() if k != name}
        yield f"free the pin layout.{name}", replace(recipe, pins=rest)
    if len(recipe.pins) > 1:
        yield "layout: auto", replace(recipe, pins={})
    unpinned = replace(recipe, pins={}) if recipe.pins else recipe
    for factor in MORE_NODES:
        yield f"nodes: {recipe.nodes * factor}", replace(unpinned, nodes=recipe.nodes * factor)
    for factor in SHORTER:
        length = recipe.workload.sequence_length // factor
        if length >= 1:
            training = replace(recipe.training, workload=replace(recipe.workload, sequence_length=length))
            yield f"training.sequence_length: {length}", replace(unpinned, training=training)
