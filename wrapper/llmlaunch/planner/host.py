"""What runs on one node, and how far its host memory may be filled."""

from __future__ import annotations

import re

from llmlaunch.errors import UserError
from llmlaunch.memory.host import Node
from llmlaunch.planner.plan import Limit
from llmlaunch.recipe.types import Recipe
from llmlaunch.units import GIB

__all__ = ["host_limit", "node_of"]

UNITS = {"": 2**20, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}  # sbatch: megabytes where no unit is given
SIZE = re.compile(r"(\d+)([KMGT]?)(?:i?B)?", re.IGNORECASE)


def node_of(recipe: Recipe) -> Node:
    """The fullest node of the job."""
    training = recipe.training
    return Node(
        processes=min(recipe.cluster.devices_per_node, recipe.world_size),
        checkpoints=training.save_interval is not None and training.checkpoint_path is not None,
        resident=recipe.cluster.accelerator.kind == "cpu",
    )


def host_limit(recipe: Recipe) -> Limit:
    """The recipe's share of what SLURM is asked for (`slurm.mem`, `slurm.mem-per-gpu`), or of the node's memory.

    Raises:
        UserError: the request is no size sbatch knows.
    """
    asked, source = _asked(recipe)
    whole = _node_bytes(recipe)
    available = whole if asked is None else min(asked, whole)
    share = recipe.memory.limit
    where = "the node's host memory" if asked is None or whole < asked else source
    return Limit(
        limit_bytes=int(available * share),
        memory_bytes=available,
        memory_source=source if asked is not None and asked <= whole else f"profile of cluster {recipe.cluster.name}",
        reason=f"{share:.0%} of {where} ({available / GIB:.0f} GiB)",
    )


def _node_bytes(recipe: Recipe) -> int:
    """On a CPU-only machine the devices' memory is the node's own: what the profile grants them is there."""
    cluster = recipe.cluster
    if cluster.accelerator.kind == "cpu":
        return max(cluster.host_memory_bytes, cluster.devices_per_node * cluster.accelerator.memory_bytes)
    return cluster.host_memory_bytes


def _asked(recipe: Recipe) -> tuple[int | None, str]:
    """(bytes of a node that sbatch is asked for, by which option); 0 asks for all of it."""
    for option, times in (("mem", 1), ("mem-per-gpu", recipe.cluster.devices_per_node)):
        value = recipe.slurm.get(option)
        if value is None or isinstance(value, bool):
            continue
        size = times * _bytes(f"{recipe.path}: slurm.{option}", str(value).strip())
        return (size or None), f"slurm.{option}"
    return None, ""


def _bytes(where: str, text: str) -> int:
    matched = SIZE.fullmatch(text)
    if matched is None:
        raise UserError(f"{where}: {text!r} is no amount of memory; write a whole number with K, M, G or T, e.g. 480G")
    return int(matched[1]) * UNITS[matched[2].upper()]
