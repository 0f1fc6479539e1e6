"""What Megatron-Bridge cannot be asked for, beside what Megatron core refuses."""

from __future__ import annotations

from llmlaunch.backends.base import Requirement

__all__ = ["BRIDGE_REQUIREMENTS"]

SETUP = "megatron/bridge/models/gpt/gpt_builder.py and training/config.py, Megatron-Bridge 0.6"

BRIDGE_REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "positions-as-long",
        "training.sequence_length",
        "with learned positions, megatron-bridge makes as many as a sequence is long; set it to "
        "model.max_position_embeddings, or take backend: megatron-lm",
        SETUP,
        lambda r: (
            r.model.position_embedding == "learned_absolute"
            and r.model.max_position_embeddings > r.workload.sequence_length
        ),
    ),
    Requirement(
        "tensorwise-parameters-load",
        "training.fp8_parameters",
        "with fp8: tensorwise, Bridge 0.6 would read 8-bit weights of a checkpoint in slices, each with another scale; "
        "remove it, or write no checkpoints and start from none",
        "megatron/training/arguments.py validate_args, core 0.19; megatron/bridge/training/checkpointing.py "
        "_load_global_dist_base_checkpoint, Megatron-Bridge 0.6",
        lambda r: (
            r.training.fp8 == "tensorwise"
            and r.training.fp8_parameters
            and (r.training.checkpoint_path is not None or r.training.start_from is not None)
        ),
    ),
    Requirement(
        "no-non-persistent-on-bridge",
        "training.non_persistent_save_interval",
        "Bridge 0.6 names these in another file than Megatron-LM, which a job that comes back does not read; remove "
        "it, or take backend: megatron-lm",
        "megatron/bridge/training/checkpointing.py _get_non_persistent_iteration, Megatron-Bridge 0.6",
        lambda r: r.training.non_persistent_save_interval is not None,
    ),
    Requirement(
        "weights-to-finetune",
        "data.sft",
        "goes on from weights that are there; name them in training.start_from",
        "megatron/bridge/training/finetune.py finetune, Megatron-Bridge 0.6",
        lambda r: r.data.sft is not None and r.training.start_from is None,
    ),
    Requirement(
        "no-trainers-on-cpus",
        "cluster",
        "megatron-bridge trains on GPUs alone; take a cluster with GPUs, or backend: deepspeed",
        "megatron/bridge/training/setup.py setup, Megatron-Bridge 0.6",
        lambda r: r.cluster.accelerator.kind == "cpu",
    ),
)
