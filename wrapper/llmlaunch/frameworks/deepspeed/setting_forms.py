"""The form that each key of ds_config.json must have where llmlaunch reads it, as DeepSpeed's own configuration types
say (0.19.8: runtime/config.py, zero/config.py, zero/offload_config.py, runtime/precision_config.py).

Whoever reads a ds_config has its keys checked here first, and so meets no text where a number should be. A key that
is read additionally takes one row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from llmlaunch.errors import UserError
from llmlaunch.frameworks.deepspeed.own_settings import AUTO
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir.foreign_values import MOST_WHOLE
from llmlaunch.rundir.values import shortened

__all__ = ["FORMS", "WrongSetting", "checked_settings", "refuse_odd_settings"]


class WrongSetting(Exception):
    """A key of a ds_config has a value of another form; the message names the dotted key and says how to correct it."""


class _Form(NamedTuple):
    """What a value must be, in words, and the test of one that is neither null nor "auto"."""

    words: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= 1e300 and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return _is_number(value) and value == int(value) and abs(value) <= MOST_WHOLE


def _is_switch(value: Any) -> bool:
    return type(value) is bool or (type(value) is int and value in (0, 1)) or str(value).lower() in ("true", "false")


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))


MAPPING = _Form("a mapping", lambda value: isinstance(value, Mapping))
WHOLE = _Form("a whole number", _is_whole)
COUNT = _Form("a whole number of at least 0", lambda value: _is_whole(value) and value >= 0)
SIZE = _Form("a whole number of at least 1", lambda value: _is_whole(value) and value >= 1)
STAGE = _Form("0, 1, 2 or 3", lambda value: _is_whole(value) and 0 <= value <= 3)
NUMBER = _Form("a number", _is_number)
SHARE = _Form("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
SWITCH = _Form("true or false", _is_switch)
TEXT = _Form("a text", lambda value: isinstance(value, str))
DEVICE = _Form("none, cpu or nvme", lambda value: value in ("none", "cpu", "nvme") and isinstance(value, str))
BETAS = _Form("a list of two numbers", _is_pair)

_ZERO = {
    "stage": STAGE,
    **dict.fromkeys(("cpu_offload", "cpu_offload_params", "cpu_offload_param", "cpu_offload_use_pin_memory"), SWITCH),
    **dict.fromkeys(("overlap_comm", "contiguous_gradients", "reduce_scatter", "allgather_partitions"), SWITCH),
    **dict.fromkeys(("round_robin_gradients", "stage3_gather_16bit_weights_on_model_save"), SWITCH),
    **dict.fromkeys(
        ("reduce_bucket_size", "allgather_bucket_size", "sub_group_size", "zero_hpz_partition_size"), COUNT
    ),
    **{
        f"{prefix}{name}": COUNT
        for prefix in ("", "stage3_")
        for name in ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance")
    },
}
_OFFLOAD = {"device": DEVICE, "pin_memory": SWITCH, "buffer_count": COUNT, "buffer_size": COUNT, "max_in_cpu": COUNT}

FORMS: Mapping[str, _Form] = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), SIZE),
    "gradient_clipping": NUMBER,
    "sequence_parallel_size": SIZE,
    **{
        f"{name}{key}": form
        for name in ("bf16", "bfloat16", "fp16")
        for key, form in (("", MAPPING), (".enabled", SWITCH))
    },
    "data_types": MAPPING,
    "data_types.grad_accum_dtype": TEXT,
    "tensor_parallel": MAPPING,
    "tensor_parallel.autotp_size": COUNT,
    "pipeline": MAPPING,
    "pipeline.stages": COUNT,
    "activation_checkpointing": MAPPING,
    "activation_checkpointing.cpu_checkpointing": SWITCH,
    "zero_optimization": MAPPING,
    **{f"zero_optimization.{name}": form for name, form in _ZERO.items()},
    "zero_optimization.offload_optimizer": MAPPING,
    "zero_optimization.offload_param": MAPPING,
    "zero_optimization.offload_optimizer.ratio": SHARE,
    **{
        f"zero_optimization.{section}.{name}": form
        for section in ("offload_optimizer", "offload_param")
        for name, form in _OFFLOAD.items()
    },
    "optimizer": MAPPING,
    "optimizer.type": TEXT,
    "optimizer.params": MAPPING,
    "optimizer.params.lr": NUMBER,
    "optimizer.params.weight_decay": NUMBER,
    "optimizer.params.betas": BETAS,
    "scheduler": MAPPING,
    "scheduler.type": TEXT,
    "scheduler.params": MAPPING,
    **{
        f"scheduler.params.{name}": form
        for name, form in (("warmup_num_steps", WHOLE), ("total_num_steps", WHOLE), ("warmup_max_lr", NUMBER))
    },
}
"""The form of each key that is read, by its dotted name; a section comes before what is in it."""


def checked_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with every section of FORMS a mapping; a section that is null is left out.

    `"zero_optimization": true` is stage 1, as DeepSpeed's earlier form had it (`read_zero_config_deprecated`). Raises
    WrongSetting for the first key that has another form.
    """
    zero = settings.get("zero_optimization")
    given = {**settings, "zero_optimization": {"stage": int(zero)}} if isinstance(zero, bool) else settings
    checked = _copied(given)
    for key, form in FORMS.items():
        *sections, name = key.split(".")
        within: Any = checked
        for section in sections:
            within = within.get(section, {})
        value = within.get(name)
        if value is None and form is MAPPING:
            within.pop(name, None)
        elif value is not None and not form.fits(value) and (form is MAPPING or value != AUTO):
            raise WrongSetting(f"{key}: must be {form.words}, not {shortened(str(value), 40)!a}; correct it")
    return checked


def refuse_odd_settings(recipe: Recipe) -> None:
    """Raise UserError for a key of `backend.ds_config` that has another form than DeepSpeed takes."""
    try:
        checked_settings(recipe.backend.ds_config)
    except WrongSetting as wrong:
        raise UserError(f"{recipe.path}: backend.ds_config.{wrong}") from None


def _copied(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copied(value) if isinstance(value, Mapping) else value for name, value in settings.items()}
