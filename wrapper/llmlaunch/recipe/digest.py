"""A digest of what a recipe means, not of how it is written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from llmlaunch.cluster.profile import Site
from llmlaunch.models.shape import Router, natural_activation
from llmlaunch.recipe.tracking import NO_TRACKING
from llmlaunch.recipe.training import Training
from llmlaunch.recipe.types import AUTO_NODES, MemoryPolicy, OnBadLoss, OnOom, Recipe, Restart, WatchdogPolicy
from llmlaunch.techniques import NO_TECHNIQUES, TREATMENT_NAMES
from llmlaunch.workload import NO_NUMBER_FORMATS

__all__ = ["recipe_digest"]

# how it was written, what was remarked on it, where a figure was found, what is measured anew from day to day, and who
# hears of it
_LEFT_OUT = frozenset(
    {"path", "text", "overrides", "digest", "assumptions", "not_secrets", "slurm_plugins", "locked_by", "notify"}
)
_UNTIL_CHOSEN = frozenset({"budget"})  # decides the number of nodes, and nothing else of a job
# a family is a way to say the shape; of a host's link and a measured network a job's meaning does not speak
_NOTES = frozenset(
    {"memory_source", "bandwidth", "found_version", "family", "host_link", "network", "document"}
    # how a host is reached, and what measured runs say of hosts
    | {"devices_per_uplink", "host_copy_bytes_per_second", "host_seconds_factor"}
    # what a job costs, and how soon it comes back
    | {"usd_per_gpu_hour", "checkpoint_gigabytes_per_second", "resume_seconds"}
)
# came after the first digests were stored: these values still mean what absent meant, so those digests hold
_LATER: Mapping[str, Any] = {
    "risk": None,
    "by_runs": True,
    "floor_asked": False,
    "calibration": "in-use",
    "accept": None,
    "techniques": NO_TECHNIQUES,
    "gradient_dtype": None,
    "numbers": NO_NUMBER_FORMATS,
    "token_dispatcher": None,
    "flex_backend": None,
    "expert_rank_capacity_factor": None,
    "paged_stash": None,
    "overlap_shared_expert": False,
    "overlap_expert_communication": False,
    "tp_comm_overlap": False,
    "context_comm": None,
    "cuda_graphs": (),
    "offload_fraction": 1.0,
    "optimizer_instances": 1,
    "target_modules": (),
    "muon": False,
    "zero_bubble": False,
    "desktop_gib": 0.0,
    "fixed": ("gradient_dtype",),
    "technique_limit": None,
    "placement": "auto",
    "nodes_per_switch": None,
    "nodes_per_block": None,
    "layers_by_stage": None,
    "preference": True,
    "node_mesh": False,
    "platform": "cuda",
    "restart": None,
    "bad_checkpoint": "previous",
    "slow_nodes": "tell",
    "on_oom": OnOom(layouts=0),
    "on_bad_loss": OnBadLoss(),
    "watchdog": WatchdogPolicy(),
    "preflight": False,
    "spare_nodes": 0,
    "at_least_nodes": None,
    "per_hour": 10,
    "lost_gpu_hours": None,
    "within": "job",
    "site": Site(),
    "runtime": "pyxis",
    "start_from": None,
    "evaluation": None,
    "validation": (),
    "checkpoint_format": None,
    "keep_checkpoints": None,
    "async_save": False,
    "non_persistent_save_interval": None,
    "tensorboard": None,
    "tracking": NO_TRACKING,
    "script_kind": "own",
    "libraries": (),
    "neutral_args": (),
    "ds_config": {},
    "blend": (),
    "sft": None,
    "packed": False,
    "attention_masks": False,
    "split": None,
    "cache_path": None,
    "tokenizer_type": None,
    "norm_epsilon": 1e-5,
    "zero_centered_norm": False,
    "post_norms": False,
    "scaled_embedding": False,
    "attention_scale": None,
    "attention_sinks": False,
    "rotary_percent": 1.0,
    "qk_norm_of_all_heads": False,
    "norms_after_alone": False,
    "attention_gate": False,
    "linear_attention": None,
    "short_convolution": None,
    "multipliers": None,
    "compressed_attention": None,
    "residual_streams": 1,
    "value_norm": False,
    "keys_are_values": False,
    "full_head_dim": None,
    "full_query_groups": None,
    "full_rotary_percent": 1.0,
    "activation_limit": None,
    "hash_layers": 0,
    "mamba": None,
    "latent_size": None,
    "mtp_repeated": False,
    "mtp_stage": "last",
    "vision": None,
    "attention_softcap": None,
    "logit_softcap": None,
    "rope_scaling": None,
    "sliding_window": None,
    "indexer": None,
    "chunked": False,
    "weighted_inputs": False,
    "qk_l2_norm": False,
    "no_rope_every": 0,
    "temperature_tuning": False,
    "shared_expert_gate": False,
    "router": Router(),
    "memory_probe": True,
    "workdir": None,
}
# The names by which the schedule stood in the first digests, and the keys of today.
_SCHEDULE = {
    "warmup_steps": "warmup_steps",
    "decay": "learning_rate_decay",
    "minimum_learning_rate": "minimum_learning_rate",
    "weight_decay": "weight_decay",
    "adam_betas": "adam_betas",
    "clipping": "gradient_clipping",
}
_PLAIN_TRAINING = (
    *("steps", "learning_rate", "seed", "log_interval", "save_interval", "checkpoint_path", "gradient_dtype"),
    *("start_from", "checkpoint_format", "keep_checkpoints", "async_save", "tensorboard", "evaluation"),
    "non_persistent_save_interval",
    "muon",
)


def recipe_digest(recipe: Recipe) -> str:
    """Return the sha256 (hex) of canonical JSON of the resolved content: defaults filled in, presets and profiles
    expanded, keys sorted. Order, comments, white space, and whether a value came from an override make no
    difference.
    """
    if recipe.restart == Restart():  # what a recipe that says nothing gets, with checkpoints or without
        recipe = replace(recipe, restart=None)
    if recipe.cluster.site.exclude:  # which nodes are bad changes from day to day, what is trained does not
        site = replace(recipe.cluster.site, exclude=())
        recipe = replace(recipe, cluster=replace(recipe.cluster, site=site))
    dispatcher = recipe.techniques.token_dispatcher  # which stood with the experts in the first digests
    techniques = replace(recipe.techniques, token_dispatcher=None)
    recipe = replace(recipe, fixed=_fixed(recipe), techniques=techniques)
    left_out = _LEFT_OUT if recipe.nodes == AUTO_NODES else _LEFT_OUT | _UNTIL_CHOSEN
    content = {name: value for name, value in _plain(recipe).items() if name not in left_out}
    if recipe.model.activation == natural_activation(recipe.model.gated_mlp):  # as absent meant, like _LATER
        del content["model"]["activation"]
    if recipe.model.moe is not None:
        content["model"]["moe"]["token_dispatcher"] = dispatcher
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _fixed(recipe: Recipe) -> tuple[str, ...]:
    """Return the names of techniques that the recipe chooses itself. Of those that a search did not choose in the first
    digests only what is switched off has to be named: the others' values are in the digest."""
    return tuple(
        name
        for name in recipe.fixed
        if name in (*TREATMENT_NAMES, "gradient_dtype")
        or (name != "loss_tiles" and getattr(recipe.techniques, name) == getattr(NO_TECHNIQUES, name))
    )


def _plain(value: Any) -> Any:
    if isinstance(value, (Recipe, Training, Site, MemoryPolicy)):
        return _stored(value)
    if is_dataclass(value):
        return _without_defaults({f.name: getattr(value, f.name) for f in fields(value)})
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _without_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _plain(item)
        for name, item in values.items()
        if name not in _NOTES and (name not in _LATER or item != _LATER[name])
    }


def _stored(value: Recipe | Training | Site | MemoryPolicy) -> dict[str, Any]:
    """Return the content of a section by the names and in the units of the first digests."""
    if isinstance(value, MemoryPolicy):
        absent = 0.80  # as the first digests have it
        policy = {"limit": absent if value.limit is None else value.limit, "floor_bytes": value.floor_bytes}
        rule = {"by_runs": value.by_runs, "floor_asked": value.floor_gib is not None and value.by_runs}
        later = {name: getattr(value, name) for name in ("risk", "calibration", "accept")}
        return _without_defaults(policy | rule | later)
    if isinstance(value, Training):
        training = {name: getattr(value, name) for name in _PLAIN_TRAINING}
        schedule = {name: getattr(value, key) for name, key in _SCHEDULE.items()}
        usual = {name: getattr(Training, key) for name, key in _SCHEDULE.items()}
        stored = _without_defaults(training | {"workload": value.workload, "numbers": value.numbers})
        return stored if schedule == usual else stored | {"schedule": _plain(schedule)}
    content = {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, Site):
        box = content.pop("container")
        return _without_defaults(content) | {"container_runtime": box.runtime, "container_mounts": list(box.mounts)}
    monitor = {"monitor_interval_seconds": value.monitor.interval_seconds, "memory_probe": value.monitor.probe}
    return _without_defaults({name: item for name, item in content.items() if name != "monitor"} | monitor)
