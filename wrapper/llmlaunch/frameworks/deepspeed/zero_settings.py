"""Settings of ds_config.json that decide what ZeRO keeps and gathers: their type, and how records of runs name them.

Nothing of a recipe is here (`stated_zero.py`): pricing a record needs none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from llmlaunch.facts import Gathering

FP32_STATES, BF16_STATES = "fp32", "bf16"
DEFAULT_GATHERING = Gathering()


@dataclass(frozen=True)
class ZeroSettings:
    """What ZeRO does by ds_config.json. `overlap_comm` makes a second bucket below stage 3; without
    `contiguous_gradients` stage 3 has no bucket of its own; `secondary_ranks` is zero_hpz_partition_size;
    `optimizer_states` is "bf16" with bf16_master_weights_and_grads and bf16_optimizer_states. `sub_group_elements` of
    None is DeepSpeed's default."""

    gathering: Gathering = DEFAULT_GATHERING
    sub_group_elements: int | None = None
    secondary_ranks: int = 1
    overlap_comm: bool = True
    contiguous_gradients: bool = True
    memory_efficient_linear: bool = True
    optimizer_states: str = FP32_STATES


DEFAULT_SETTINGS = ZeroSettings(overlap_comm=False)  # below stage 3


def recorded_settings(settings: ZeroSettings, bucket: int, live: int) -> dict[str, Any]:
    """Return what a record's `implementation` says of the settings: those that are not as llmlaunch renders them."""
    usual = ZeroSettings(Gathering(prefetch_elements=bucket, live_elements=live, reuse_elements=live))
    gathering, usual_gathering = asdict(settings.gathering), asdict(usual.gathering)
    flat = {**asdict(settings), **gathering}
    usual_flat = {**asdict(usual), **usual_gathering}
    names = (*(f.name for f in fields(ZeroSettings) if f.name != "gathering"), *gathering)
    return {name: flat[name] for name in names if flat[name] != usual_flat[name]}


def settings_of_record(implementation: Mapping[str, Any]) -> ZeroSettings:
    """Return the settings of a record's `implementation`: DeepSpeed's defaults where it says nothing, and what
    llmlaunch renders in a record of a run of its own, which names the kind of script."""
    ours, rendered = bool(implementation.get("trainer")), dict[str, Any]()
    if ours:
        rendered["reuse_elements"] = implementation.get("live_elements")
        rendered["prefetch_elements"] = implementation.get("reduce_bucket_elements")
    stated = {**rendered, **{f.name: implementation.get(f.name) for f in fields(Gathering)}}
    gathering = replace(Gathering(), **{name: value for name, value in stated.items() if value is not None})
    names = [f.name for f in fields(ZeroSettings) if f.name != "gathering"]
    others = {name: implementation[name] for name in names if implementation.get(name) is not None}
    return ZeroSettings(gathering=gathering, **{"overlap_comm": ours, **others})
