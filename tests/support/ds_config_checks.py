"""Our own checks of a ds_config: what DeepSpeedConfig 0.19.8 takes although nothing comes of it, or something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Json = Mapping[str, Any]
Keys = Iterator[str]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keys read by `DeepSpeedConfig._initialize_params` and by `deepspeed.initialize`; anything else is ignored.
KNOWN_KEYS: Mapping[str, frozenset[str]] = {
    "": _names(
        """
        activation_checkpointing aio autotuning bf16 bfloat16 checkpoint comet comms_logger communication_data_type
        compile compression_training csv_monitor data_efficiency data_parallel_size data_types dataloader_drop_last
        datastates_ckpt disable_allgather disable_python_gc dump_state expert_parallel flops_profiler fp16
        gradient_accumulation_steps gradient_allreduce_op gradient_clipping gradient_predivide_factor hybrid_engine
        log_level managed_gradient_accumulation memory_breakdown optimizer pipeline prescale_gradients scheduler
        seq_parallel_communication_data_type sequence_parallel_size sparse_gradients steps_per_print tensor_parallel
        tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
        use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb weight_quantization
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
        """
    ),
    "activation_checkpointing": _names(
        """
        contiguous_memory_optimization cpu_checkpointing number_checkpoints partition_activations profile
        synchronize_checkpoint_boundary
        """
    ),
    "pipeline": _names(
        """
        activation_checkpoint_interval grad_partitioned partition pipe_partitioned seed_layers stages use_reentrant
        """
    ),
    "data_types": _names("buffer_dtype grad_accum_dtype keep_in_fp32_modules param_dtype"),
}
OPTIMIZERS = _names("adagrad adam adamw lamb lion muadam muadamw musgd muon")
SCHEDULES = _names("LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR")
PYDANTIC = ("zero_optimization", "bf16", "fp16", "tensor_parallel")


def _unknown_keys(config: Json) -> Keys:
    """deepspeed/runtime/config.py: nothing comes of a key that is not read."""
    for section, known in KNOWN_KEYS.items():
        said = config if not section else config.get(section, {})
        yield from (f"{section}.{key}".lstrip(".") for key in said if key not in known)


def _auto(config: Json) -> Keys:
    """deepspeed/runtime/config_utils.py DeepSpeedConfigModel: "auto" is dropped silently and the default taken; Hugging
    Face's Trainer alone fills it in."""
    for section in PYDANTIC:
        yield from _autos(config.get(section, {}), section)


def _autos(said: Json, within: str) -> Keys:
    for key, value in said.items():
        if value == "auto":
            yield f"{within}.{key}"
        elif isinstance(value, Mapping):
            yield from _autos(value, f"{within}.{key}")


def _optimizer(config: Json) -> Keys:
    """deepspeed/runtime/config.py: torch is asked for a name that is none of DeepSpeed's optimizers."""
    name = config.get("optimizer", {}).get("type")
    if name is not None and str(name).lower() not in OPTIMIZERS:
        yield "optimizer.type"


def _scheduler(config: Json) -> Keys:
    """deepspeed/runtime/lr_schedules.py VALID_LR_SCHEDULES: torch is asked for a name that is none of DeepSpeed's."""
    name = config.get("scheduler", {}).get("type")
    if name is not None and name not in SCHEDULES:
        yield "scheduler.type"


def _stage(config: Json) -> int:
    return int(config.get("zero_optimization", {}).get("stage", 0))


def _offloaded_parameters(config: Json) -> Keys:
    """deepspeed/runtime/zero/offload_config.py: ignored below ZeRO stage 3."""
    section = config.get("zero_optimization", {}).get("offload_param") or {}
    if section.get("device", "none") != "none" and _stage(config) < 3:
        yield "zero_optimization.offload_param"


def _offloaded_optimizer(config: Json) -> Keys:
    """deepspeed/runtime/zero/offload_config.py: ignored at ZeRO stage 0."""
    section = config.get("zero_optimization", {}).get("offload_optimizer") or {}
    if section.get("device", "none") != "none" and _stage(config) == 0:
        yield "zero_optimization.offload_optimizer"


def _pipeline_zero(config: Json) -> Keys:
    """deepspeed/runtime/pipe/engine.py PipelineEngine.__init__: ends a job with a pipeline, when its engine is made."""
    if "pipeline" in config and _stage(config) > 1:
        yield "zero_optimization.stage"


def _pipeline_tensor(config: Json) -> Keys:
    """deepspeed/runtime/engine.py _configure_tensor_parallel_states, pipe/engine.py: the collectives of a job with a
    pipeline are of different sizes, and it aborts."""
    if "pipeline" in config and _tensor(config) > 1:
        yield "tensor_parallel.autotp_size"


def _tensor(config: Json) -> int:
    return int(config.get("tensor_parallel", {}).get("autotp_size", 1))


def _both_splits(config: Json) -> Keys:
    """deepspeed/utils/groups.py _init_tp_mesh_device, runtime/sequence_parallel/parallel_state_sp.py: both make groups
    of neighbouring ranks, and gradients are summed over the wrong ones."""
    if _tensor(config) > 1 and int(config.get("sequence_parallel_size", 1)) > 1:
        yield "sequence_parallel_size"


def _wide_gradients(config: Json) -> Keys:
    """deepspeed/runtime/engine.py _do_optimizer_sanity_check: fp32 beside a narrower precision needs ZeRO stage 1, 2 or
    3; refused when the engine is made."""
    wide = config.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    half = any(config.get(name, {}).get("enabled") for name in ("bf16", "fp16"))
    if wide and half and _stage(config) == 0:
        yield "data_types.grad_accum_dtype"


CHECKS: dict[str, Callable[[Json], Keys]] = {
    "unknown-key": _unknown_keys,
    "auto-for-default": _auto,
    "optimizer": _optimizer,
    "scheduler": _scheduler,
    "offload-parameters": _offloaded_parameters,
    "offload-optimizer": _offloaded_optimizer,
    "pipeline-zero": _pipeline_zero,
    "pipeline-tensor": _pipeline_tensor,
    "tensor-or-context": _both_splits,
    "wide-gradients": _wide_gradients,
}


def wrongly_accepted(config: Json) -> list[tuple[str, str]]:
    """Return dotted key and check for each place of a ds_config that DeepSpeedConfig takes and that is wrong."""
    return [(key, name) for name, check in CHECKS.items() for key in check(config)]
