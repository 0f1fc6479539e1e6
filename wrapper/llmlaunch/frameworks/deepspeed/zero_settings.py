"""Settings of ds_config.json that decide what ZeRO keeps and gathers: their type, and how records of runs name them.

Nothing of a recipe is here (`stated_zero.py`): pricing a record needs none.
"""

from __future__ import annotations

from dataclasses import dataclass

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
