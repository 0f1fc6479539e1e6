"""Which format of checkpoints goes with what (Megatron core 0.19), as data."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmlaunch.backends.megatron.sharding import asks_for_sharding
from llmlaunch.backends.requirements import Requirement
from llmlaunch.layout import Rule, Situation

__all__ = ["CHECKPOINT_REQUIREMENTS", "CHECKPOINT_RULES"]

Bools = NDArray[np.bool_]
ARGUMENTS = "megatron/training/arguments.py validate_args, core 0.19"
KEY = "training.checkpoint_format"

CHECKPOINT_REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "no-torch-dcp",
        KEY,
        "torch_dcp needs --use-torch-fsdp2, which is not planned; write fsdp_dtensor with zero_stage 2 or 3",
        ARGUMENTS,
        lambda r: r.training.checkpoint_format == "torch_dcp",
    ),
    Requirement(
        "sharded-format",
        KEY,
        "zero_stage 2 and 3 take fsdp_dtensor alone; remove it",
        ARGUMENTS,
        lambda r: asks_for_sharding(r) and r.training.checkpoint_format not in (None, "fsdp_dtensor"),
    ),
    Requirement(
        "format-of-sharded",
        KEY,
        "fsdp_dtensor needs zero_stage 2 or 3; pin one, or remove it",
        ARGUMENTS,
        lambda r: r.training.checkpoint_format == "fsdp_dtensor" and not asks_for_sharding(r),
    ),
)


def whole_optimizer(s: Situation) -> Bools:
    column: Bools = np.equal(s.layouts.zero_stage, 0)
    return column


# Looked at only where a recipe asks for the format torch.
CHECKPOINT_RULES: tuple[Rule, ...] = (
    Rule(
        "old-format-whole-optimizer",
        "checkpoint_format: torch needs zero_stage 0: one rank would gather the states of a sharded optimizer in host "
        "memory",
        "megatron/core/optimizer/distrib_optimizer.py get_parameter_state_dp_zero, core 0.19",
        whole_optimizer,
        of_words=True,
    ),
)
