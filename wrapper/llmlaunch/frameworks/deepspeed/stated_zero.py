"""What a recipe's `backend.ds_config` says of ZeRO: the settings that are priced, and the rules of those that DeepSpeed
refuses with some layouts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from llmlaunch.columns import BoolColumn
from llmlaunch.documents.nested import value_at
from llmlaunch.facts import Gathering
from llmlaunch.frameworks.deepspeed.number_formats import optimizer_states
from llmlaunch.frameworks.deepspeed.own_settings import AUTO, own_number
from llmlaunch.frameworks.deepspeed.settings import SETTINGS
from llmlaunch.frameworks.deepspeed.zero_settings import DEFAULT_GATHERING, ZeroSettings
from llmlaunch.layout import Rule, Situation
from llmlaunch.recipe.types import Recipe

ZERO = "zero_optimization"


def stated_settings(recipe: Recipe, bucket: int, live: int) -> ZeroSettings:
    """Return the settings of a rendered job: those of `backend.ds_config` over what llmlaunch renders, which prefetches
    a `bucket` and lets `live` parameters live. "auto" is what Hugging Face's Trainer fills in
    (transformers/integrations/deepspeed.py trainer_config_finalize, 5.23).

    Raises:
        UserError: a size is no whole number of at least 0.
    """
    limits: dict[str, Any] = {"prefetch_elements": bucket, "live_elements": live, "reuse_elements": live}
    for row in SETTINGS:
        if not row.prices:
            continue
        default = getattr(DEFAULT_GATHERING, row.prices)
        number = own_number(recipe, row.key, row.automatic(recipe) if row.automatic is not None else default)
        if number is not None and row.prices != "live_elements":
            limits[row.prices] = number
    limits["sequential"] = value_at(recipe.backend.ds_config, f"{ZERO}.stage3_allgather_sequential") is True
    return ZeroSettings(
        gathering=Gathering(**limits),
        sub_group_elements=own_number(recipe, f"{ZERO}.sub_group_size", 0) or None,
        secondary_ranks=own_number(recipe, f"{ZERO}.zero_hpz_partition_size", 1) or 1,
        overlap_comm=_switch(recipe, "overlap_comm", recipe.cluster.accelerator.kind == "gpu"),
        contiguous_gradients=_switch(recipe, "contiguous_gradients", True),
        memory_efficient_linear=_switch(recipe, "memory_efficient_linear", True),
        optimizer_states=optimizer_states(recipe),
    )


def setting_rules(recipe: Recipe) -> tuple[Rule, ...]:
    """Return the rules of keys of `backend.ds_config` that DeepSpeed refuses with some layouts."""
    ranks = own_number(recipe, f"{ZERO}.zero_hpz_partition_size", 1) or 1
    rules = list(_version_rules(recipe))
    if ranks > 1:
        rules.append(
            Rule(
                "second-shards",
                f"zero_hpz_partition_size {ranks} must divide the number of devices",
                "deepspeed/utils/groups.py _create_zero_param_parallel_group, 0.19.8",
                lambda s: np.full(len(s.layouts), s.world_size % min(ranks, s.world_size) == 0),
            )
        )
    return tuple(rules)


def _version_rules(recipe: Recipe) -> Iterator[Rule]:
    """Yield a rule for each split whose keys the job's DeepSpeed does not have, where its version is known."""
    version = recipe.backend.runs_version
    missing = {row.splits: row for row in SETTINGS if row.splits and version is not None and not row.is_in(version)}
    for split, row in missing.items():
        yield Rule(
            f"{split}-version",
            f"{split} above 1 is rendered with {row.key}, which DeepSpeed {version} does not have (it came with "
            f"{row.since}); set {split} to 1 or use a newer version",
            "llmlaunch/frameworks/deepspeed/settings.py SETTINGS",
            partial(_is_whole, split=split),
        )


def _is_whole(s: Situation, split: str) -> BoolColumn:
    unsplit: BoolColumn = np.equal(getattr(s.layouts, split), 1)
    return unsplit


def _switch(recipe: Recipe, key: str, rendered: bool) -> bool:
    value = value_at(recipe.backend.ds_config, f"{ZERO}.{key}")
    return rendered if value is None or value == AUTO else value is True
