"""A digest of what a recipe means, not of how it is written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from typing import Any

from llmlaunch.cluster.profile import Accelerator, Cluster, Site
from llmlaunch.models.shape import ModelShape
from llmlaunch.recipe.types import AUTO_NODES, BackendChoice, Recipe, Restart

# how it was written, what was remarked on it, and who hears of it
_LEFT_OUT = frozenset(
    {"path", "text", "overrides", "digest", "assumptions", "not_secrets", "slurm_plugins", "locked_by", "notify"}
)
_UNTIL_CHOSEN = frozenset({"budget"})  # decides the number of nodes, and nothing else of a job
# Fields of a section of which a job's meaning does not speak.
_NOTES: Mapping[type[Any], frozenset[str]] = {
    Recipe: frozenset({"document"}),
    BackendChoice: frozenset({"found_version"}),
    ModelShape: frozenset({"family"}),  # a way to say the shape
    # where a figure was found, and what is measured anew from day to day
    Accelerator: frozenset({"memory_source", "host_link"}),
    Cluster: frozenset({"bandwidth", "network"})
    # how a host is reached, and what measured runs say of hosts
    | {"devices_per_uplink", "host_copy_bytes_per_second", "host_seconds_factor"},
    # bad nodes of today, what a job costs, and how soon it comes back
    Site: frozenset({"exclude", "usd_per_gpu_hour", "checkpoint_gigabytes_per_second", "resume_seconds"}),
}


def recipe_digest(recipe: Recipe) -> str:
    """Return the sha256 (hex) of canonical JSON of the resolved content: presets and profiles expanded, keys sorted,
    what has its default left out. Order, comments, white space, and whether a value is written out or came from an
    override make no difference.
    """
    if recipe.restart == Restart():  # what a recipe that says nothing gets, with checkpoints or without
        recipe = replace(recipe, restart=None)
    if recipe.training.tokens is not None:  # which are a way to say the steps
        recipe = replace(recipe, training=replace(recipe.training, tokens=None))
    left_out = _LEFT_OUT if recipe.nodes == AUTO_NODES else _LEFT_OUT | _UNTIL_CHOSEN
    content = {name: value for name, value in plain_content(recipe).items() if name not in left_out}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def plain_content(value: Any) -> Any:
    """Return a value as JSON has it: sections as mappings, without their notes and without what has its default."""
    if is_dataclass(value):
        notes = _NOTES.get(type(value), frozenset())
        stated = {f: plain_content(getattr(value, f.name)) for f in fields(value) if f.name not in notes}
        return {f.name: item for f, item in stated.items() if item != plain_content(_default(f))}
    if isinstance(value, Mapping):
        return {str(key): plain_content(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_content(item) for item in value]
    return value


def _default(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()
