"""Which format of checkpoints goes with what (Megatron core 0.19), as data."""

from __future__ import annotations

from llmlaunch.backends.megatron.sharding import asks_for_sharding, pinned_stages
from llmlaunch.backends.requirements import Requirement

__all__ = ["CHECKPOINT_REQUIREMENTS"]

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
    Requirement(
        "old-format-whole-optimizer",
        KEY,
        "torch needs zero_stage: 0 pinned: one rank would gather the states of a sharded optimizer in host memory",
        "megatron/core/optimizer/distrib_optimizer.py get_parameter_state_dp_zero, core 0.19",
        lambda r: r.training.checkpoint_format == "torch" and set(pinned_stages(r)) != {0},
    ),
)
