"""What trainers that nobody can launch do where a record does not say: rows as those of `calibration.completion`."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.calibration.stated.completion import (
    PRECISION,
    ZERO_CONFIG,
    Default,
    cites,
    defaults_of,
    in_bf16,
    not_in_bf16,
    splits_tensors,
)

FORK, TITAN, TUNE = ("megatron-deepspeed",), ("torchtitan-fsdp2",), ("torchtune single-device",)
WRAPPED = ("fsdp (composer)", "fsdp (atorch)", "internevo-fsdp")  # by FullyShardedDataParallel

FORK_ARGUMENTS = "megatron/arguments.py, bigscience-workshop/Megatron-DeepSpeed 2023-12"
TITAN_CONFIG = "torchtitan/config_manager.py, torchtitan 9dec370"
TITAN_PLAN = "torchtitan/parallelisms/parallelize_llama.py, torchtitan 9dec370"
TUNE_RECIPE = "recipes/full_finetune_single_device.py, torchtune bd2a0fc7"
TORCH_FSDP = "torch/distributed/fsdp/api.py, torch 2.13"
INTERNEVO = "sequence_parallel, InternEvo configs/7B_sft.py, 7776693"
GPT_2021 = "unfused_optimizer.py, DeepSpeed 0.4, experiments/gpt2-meg-ds-3d/meg_ds_3d_gpt2_perf_n16-ds-on.out, 2021-06"

_bloom = cites("bigscience-workshop/bigscience", "train/tr11-176B-ml/")
_gpt_2021 = cites("bigscience-workshop/bigscience", "experiments/gpt2")


def _as_of(backend: str, fields: tuple[str, ...], backends: tuple[str, ...]) -> tuple[Default, ...]:
    """Return rows of a backend that llmlaunch runs, for trainers that do the same by default."""
    return tuple(replace(row, backends=backends) for row in defaults_of(backend) if row.field in fields)


LLAMA_FIELDS = ("model.gated_mlp", "model.normalization", "model.position_embedding")
GPT_FIELDS = (*LLAMA_FIELDS, "model.tied_embeddings", "model.linear_bias")

# In this order: a later row may ask for what an earlier one filled in.
PUBLIC_DEFAULTS: tuple[Default, ...] = (
    Default(FORK, "recompute.granularity", "none", f"--checkpoint-activations is off, {FORK_ARGUMENTS}"),
    Default(TITAN, "recompute.granularity", "selective", f"--activation_checkpoint.mode, {TITAN_CONFIG}"),
    Default(TUNE, "recompute.granularity", "none", f"enable_activation_checkpointing, {TUNE_RECIPE}"),
    Default(WRAPPED, "recompute.granularity", "none", f"recomputes nothing by itself, {TORCH_FSDP}"),
    Default(FORK, "optimizer.gradient_dtype", "fp32", f"set with --bf16, {FORK_ARGUMENTS}", in_bf16),
    Default(FORK, "optimizer.gradient_dtype", PRECISION, f"the parameters' own, {FORK_ARGUMENTS}", not_in_bf16),
    Default(FORK, "optimizer.zero_stage", 0, f"stage 0, {ZERO_CONFIG}"),
    Default(TITAN + WRAPPED, "optimizer.zero_stage", 3, f"FULL_SHARD, {TORCH_FSDP}"),
    Default(TUNE, "optimizer.zero_stage", 0, f"one device, {TUNE_RECIPE}"),
    Default(FORK, "parallelism.sequence_parallel", False, f"has none, {FORK_ARGUMENTS}", splits_tensors),
    Default(TITAN, "parallelism.sequence_parallel", True, f"apply_tp, {TITAN_PLAN}", splits_tensors),
    Default(WRAPPED, "parallelism.sequence_parallel", False, INTERNEVO, splits_tensors),
    Default(FORK, "implementation.attention", "unfused", "scores are kept, megatron/model/transformer.py, same fork"),
    Default(FORK, "implementation.cross_entropy_fusion", "none", f"has none, {FORK_ARGUMENTS}"),
    Default(FORK, "implementation.gradient_accumulation_fusion", False, f"has none, {FORK_ARGUMENTS}"),
    Default(FORK, "implementation.embedding_norm", True, f"tr11-176B-ml/*.slurm set it, {FORK_ARGUMENTS}", _bloom),
    Default(FORK, "implementation.fused_optimizer", False, GPT_2021, _gpt_2021),
    *_as_of("megatron-lm", GPT_FIELDS, FORK),
    *_as_of("deepspeed", LLAMA_FIELDS, TITAN + TUNE + WRAPPED),
    Default(FORK, "model.attention_dropout", 0.1, f"--attention-dropout, {FORK_ARGUMENTS}"),
    Default(FORK, "model.hidden_dropout", 0.1, f"--hidden-dropout, {FORK_ARGUMENTS}"),
)


def public_defaults_of(backend: str) -> tuple[Default, ...]:
    """Return the rows of a trainer that nobody can launch, in their order."""
    return tuple(row for row in PUBLIC_DEFAULTS if backend in row.backends)
