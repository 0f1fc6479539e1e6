"""What Megatron core cannot do with checkpoints (core 0.19), as data."""

from __future__ import annotations

from llmlaunch.frameworks.argument import ALLOCATOR_NAMES, EXPANDABLE_SEGMENTS
from llmlaunch.frameworks.base import Requirement
from llmlaunch.frameworks.megatron.sharding import asks_for_sharding, pinned_stages

ARGUMENTS = "megatron/training/arguments.py validate_args, core 0.19"
KEY = "training.checkpoint_format"

CHECKPOINT_REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "async-format",
        "training.async_save",
        "writes torch_dist alone: torch cannot, and fsdp_dtensor needs nvidia-resiliency-ext; remove it, or take "
        "torch_dist with zero_stage 0 or 1",
        "megatron/training/checkpointing.py save_checkpoint, megatron/training/config/training_config.py, core 0.19",
        lambda r: (
            r.training.async_save and (r.training.checkpoint_format not in (None, "torch_dist") or asks_for_sharding(r))
        ),
    ),
    Requirement(
        "async-on-a-gpu",
        "training.async_save",
        "needs a GPU, to which the process that writes binds itself; remove it",
        "megatron/core/dist_checkpointing/strategies/async_utils.py PersistentAsyncCaller.async_loop, core 0.19",
        lambda r: r.training.async_save and r.cluster.accelerator.kind != "gpu",
    ),
    Requirement(
        "async-whole-segments",
        "training.async_save",
        "the process that writes cannot read tensors in expandable segments; remove expandable_segments:True from "
        "environment.PYTORCH_CUDA_ALLOC_CONF, or async_save",
        "c10/cuda/CUDACachingAllocator.cpp ExpandableSegment::fromShared, torch 2.13",
        lambda r: (
            r.training.async_save
            and any(EXPANDABLE_SEGMENTS in r.environment.get(name, "") for name in ALLOCATOR_NAMES)
        ),
    ),
    Requirement(
        "non-persistent-format",
        "training.non_persistent_save_interval",
        "is read back in torch_dist alone; remove it, or take torch_dist with zero_stage 0 or 1",
        "megatron/training/checkpointing.py save_checkpoint and _load_non_persistent_base_checkpoint, core 0.19",
        lambda r: (
            r.training.non_persistent_save_interval is not None
            and (r.training.checkpoint_format not in (None, "torch_dist") or asks_for_sharding(r))
        ),
    ),
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
