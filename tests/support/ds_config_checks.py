"""Our own checks of a ds_config: what DeepSpeedConfig 0.19.8 takes although nothing comes of it, or something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CHECKS", "KNOWN_KEYS", "Check", "wrongly_accepted"]

Json = Mapping[str, Any]
Found = Iterator[str]

CONFIG = "deepspeed/runtime/config.py"


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


@dataclass(frozen=True)
class Check:
    """`found(config)` names each place that is wrong; `sentence` says what DeepSpeed makes of it."""

    key: str
    sentence: str
    where: str
    found: Callable[[Json], Found]


def _unknown_keys(config: Json) -> Found:
    for section, known in KNOWN_KEYS.items():
        said = config if not section else config.get(section, {})
        yield from (f"{section}.{key}".lstrip(".") for key in said if key not in known)


def _auto(config: Json) -> Found:
    for section in PYDANTIC:
        yield from _autos(config.get(section, {}), section)


def _autos(said: Json, within: str) -> Found:
    for key, value in said.items():
        if value == "auto":
            yield f"{within}.{key}"
        elif isinstance(value, Mapping):
            yield from _autos(value, f"{within}.{key}")


def _optimizer(config: Json) -> Found:
    name = config.get("optimizer", {}).get("type")
    if name is not None and str(name).lower() not in OPTIMIZERS:
        yield "optimizer.type"


def _scheduler(config: Json) -> Found:
    name = config.get("scheduler", {}).get("type")
    if name is not None and name not in SCHEDULES:
        yield "scheduler.type"


def _stage(config: Json) -> int:
    return int(config.get("zero_optimization", {}).get("stage", 0))


def _offloaded_parameters(config: Json) -> Found:
    section = config.get("zero_optimization", {}).get("offload_param") or {}
    if section.get("device", "none") != "none" and _stage(config) < 3:
        yield "zero_optimization.offload_param"


def _offloaded_optimizer(config: Json) -> Found:
    section = config.get("zero_optimization", {}).get("offload_optimizer") or {}
    if section.get("device", "none") != "none" and _stage(config) == 0:
        yield "zero_optimization.offload_optimizer"


def _pipeline_zero(config: Json) -> Found:
    if "pipeline" in config and _stage(config) > 1:
        yield "zero_optimization.stage"


def _pipeline_tensor(config: Json) -> Found:
    if "pipeline" in config and _tensor(config) > 1:
        yield "tensor_parallel.autotp_size"


def _tensor(config: Json) -> int:
    return int(config.get("tensor_parallel", {}).get("autotp_size", 1))


def _both_splits(config: Json) -> Found:
    if _tensor(config) > 1 and int(config.get("sequence_parallel_size", 1)) > 1:
        yield "sequence_parallel_size"


def _wide_gradients(config: Json) -> Found:
    wide = config.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    half = any(config.get(name, {}).get("enabled") for name in ("bf16", "fp16"))
    if wide and half and _stage(config) == 0:
        yield "data_types.grad_accum_dtype"


CHECKS: tuple[Check, ...] = (
    Check("unknown-key", "is a key DeepSpeed does not read: nothing comes of it", CONFIG, _unknown_keys),
    Check(
        "auto-for-default",
        '"auto" is dropped silently and the default taken; Hugging Face\'s Trainer alone fills it in',
        "deepspeed/runtime/config_utils.py DeepSpeedConfigModel",
        _auto,
    ),
    Check("optimizer", "is no optimizer of DeepSpeed's; torch is asked for one of that name", CONFIG, _optimizer),
    Check(
        "scheduler",
        "is no schedule of DeepSpeed's; torch is asked for one of that name",
        "deepspeed/runtime/lr_schedules.py VALID_LR_SCHEDULES",
        _scheduler,
    ),
    Check(
        "offload-parameters",
        "is ignored below ZeRO stage 3",
        "deepspeed/runtime/zero/offload_config.py",
        _offloaded_parameters,
    ),
    Check(
        "offload-optimizer",
        "is ignored at ZeRO stage 0",
        "deepspeed/runtime/zero/offload_config.py",
        _offloaded_optimizer,
    ),
    Check(
        "pipeline-zero",
        "above 1 ends a job with a pipeline, when its engine is made",
        "deepspeed/runtime/pipe/engine.py PipelineEngine.__init__",
        _pipeline_zero,
    ),
    Check(
        "pipeline-tensor",
        "above 1 in a job with a pipeline: its collectives are of different sizes, and it aborts",
        "deepspeed/runtime/engine.py _configure_tensor_parallel_states, pipe/engine.py",
        _pipeline_tensor,
    ),
    Check(
        "tensor-or-context",
        "beside tensor_parallel: both make groups of neighbouring ranks, and gradients are summed over the wrong ones",
        "deepspeed/utils/groups.py _init_tp_mesh_device, runtime/sequence_parallel/parallel_state_sp.py",
        _both_splits,
    ),
    Check(
        "wide-gradients",
        "fp32 beside a narrower precision needs ZeRO stage 1, 2 or 3: refused when the engine is made",
        "deepspeed/runtime/engine.py _do_optimizer_sanity_check",
        _wide_gradients,
    ),
)


def wrongly_accepted(config: Json) -> list[tuple[str, Check]]:
    """(dotted key, check) for each place of a ds_config that DeepSpeedConfig takes and that is wrong all the same."""
    return [(key, check) for check in CHECKS for key in check.found(config)]
