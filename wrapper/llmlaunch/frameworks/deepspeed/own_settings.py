"""`backend.ds_config`: keys of ds_config.json that a person writes beside those the recipe decides, and in place of
those llmlaunch chooses, such as the sizes of buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import Reason
from llmlaunch.recipe.types import Recipe

__all__ = [
    "AUTO",
    "CHOSEN",
    "OWN_REASON",
    "own_leaves",
    "own_number",
    "own_setting",
    "refuse_planned_settings",
    "with_own_settings",
]

AUTO = "auto"  # for Hugging Face's Trainer, which fills it in
OWN_REASON = Reason(("backend.ds_config",), "as the recipe has it")
# Keys that follow from no key of a recipe: llmlaunch chooses them, and a person may choose otherwise.
CHOSEN = frozenset(
    (
        *("steps_per_print", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
        *("fp16.loss_scale", "fp16.initial_scale_power", "seq_parallel_communication_data_type"),
        *("zero_optimization.contiguous_gradients", "zero_optimization.overlap_comm"),
        *("zero_optimization.reduce_scatter", "zero_optimization.sub_group_size"),
        *("zero_optimization.reduce_bucket_size", "zero_optimization.allgather_bucket_size"),
        *("zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.stage3_param_persistence_threshold"),
        *("zero_optimization.stage3_max_live_parameters", "zero_optimization.stage3_max_reuse_distance"),
        *("zero_optimization.offload_optimizer.pin_memory", "zero_optimization.offload_param.pin_memory"),
    )
)
# Keys of ds_config.json that a key of the recipe decides.
PLANNED: Mapping[str, str] = {
    "train_batch_size": "training.global_batch_size",
    "train_micro_batch_size_per_gpu": "layout.micro_batch_size",
    "gradient_accumulation_steps": "training.global_batch_size",
    "gradient_clipping": "training.gradient_clipping",
    "data_types.grad_accum_dtype": "training.gradient_dtype",
    "bf16.enabled": "training.precision",
    "fp16.enabled": "training.precision",
    "tensor_parallel.autotp_size": "layout.tensor",
    "sequence_parallel_size": "layout.context",
    "pipeline.stages": "layout.pipeline",
    "activation_checkpointing.cpu_checkpointing": "layout.offload_checkpoints",
    "zero_optimization.stage": "layout.zero_stage",
    "zero_optimization.cpu_offload": "layout.offload_optimizer",
    "zero_optimization.offload_optimizer.device": "layout.offload_optimizer",
    "zero_optimization.offload_optimizer.ratio": "layout.offload_optimizer",
    "zero_optimization.cpu_offload_param": "layout.offload_parameters",
    "zero_optimization.offload_param.device": "layout.offload_parameters",
}


def own_setting(recipe: Recipe, key: str) -> Any:
    """Return the value of a dotted key of `backend.ds_config`; None where it is not written."""
    value: Any = recipe.backend.ds_config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def own_number(recipe: Recipe, key: str, automatic: int) -> int | None:
    """Return a number of `backend.ds_config`, `automatic` where it is "auto", and None where it is not written.

    Raises UserError for what is no whole number of at least 0.
    """
    value = own_setting(recipe, key)
    if value is None or (value == AUTO and isinstance(value, str)):
        return None if value is None else automatic
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != int(value):
        raise UserError(f"{recipe.path}: backend.ds_config.{key}: must be a whole number, not {str(value)[:40]!a}")
    return int(value)


def with_own_settings(config: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the person's keys over and beside those in it."""
    merged = dict(config)
    for name, value in own.items():
        below = merged.get(name)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[name] = with_own_settings(below, value) if both else value  # type: ignore[arg-type]
    return merged


def refuse_planned_settings(recipe: Recipe) -> None:
    """Raise UserError for a key that the recipe decides elsewhere, and for "auto" where nobody would fill it in."""
    for key, value in own_leaves(recipe):
        if key in PLANNED:
            raise UserError(
                f"{recipe.path}: backend.ds_config.{key}: follows from {PLANNED[key]}; write that, and remove it here"
            )
        if value == AUTO and recipe.backend.script_kind != "hugging-face":
            raise UserError(
                f'{recipe.path}: backend.ds_config.{key}: "auto" is filled in by Hugging Face\'s Trainer alone; write '
                "the value"
            )


def own_leaves(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Yield every key of `backend.ds_config` that holds no section, dotted, with its value."""
    yield from _leaves(recipe.backend.ds_config)


def _leaves(settings: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{within}{name}.")
        else:
            yield f"{within}{name}", value
