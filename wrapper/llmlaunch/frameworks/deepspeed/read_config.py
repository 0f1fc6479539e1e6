"""ds_config.json read into keys of a recipe: what it says of the split, the batch and the numbers, and the rest of it.

"auto" is for Hugging Face's Trainer, which fills it in from its own arguments (transformers/integrations/deepspeed.py,
5.23); DeepSpeed itself would take it for the default.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmlaunch.command_lines.command import TrainerCommand
from llmlaunch.command_lines.options import true_or_false, whole_or_none
from llmlaunch.command_lines.recipe_draft import RecipeDraft
from llmlaunch.documents.json_strict import parse_object
from llmlaunch.documents.yaml_strict import parse_document, read_text
from llmlaunch.errors import UserError
from llmlaunch.frameworks.deepspeed.own_settings import AUTO
from llmlaunch.frameworks.deepspeed.setting_forms import WrongSetting, checked_settings

__all__ = ["ADDED", "DsConfig", "ds_config_of", "file_text", "keep_precision", "parse_ds_config", "read_mapping"]

ZERO = "zero_optimization"
# deepspeed/runtime/zero/config.py, 0.19.8: where a file does not say them, llmlaunch would write its own smaller ones.
BUCKETS = {"reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000}
BUCKETS_OF_3 = {"stage3_prefetch_bucket_size": 50_000_000}
NAMES_OF_3 = {  # what the keys were called before (the fields' own names, which DeepSpeed takes too)
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "model_persistence_threshold": "stage3_model_persistence_threshold",
    "allgather_sequential": "stage3_allgather_sequential",
}
# What rendering adds to a file that lacks it, and is not DeepSpeed's default.
ADDED = {
    "zero_allow_untested_optimizer": "an optimizer that the script brings may be any",
    "zero_force_ds_cpu_optimizer": "that optimizer steps on the host too, as it is",
    "steps_per_print": "DeepSpeed reports as often as the trainer does",
}
PRECISIONS = ("bf16", "bfloat16", "fp16")
DECAYS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
# Change what is computed or kept in ways that the estimate does not count.
UNPRICED = ("sparse_attention", "compression_training", "progressive_layer_drop", "quantize_training", "torch_autocast")


def file_text(command: TrainerCommand, path: str) -> str | None:
    """Return the text of a file that a command names: one that its script writes, or one that is there. None where
    there is none. Raises UserError for a file that cannot be read."""
    for name in (path, Path(path).name):
        if name in command.files:
            return command.files[name]
    place = command.folder / path
    try:
        if not place.is_file():
            return None
    except (OSError, ValueError):
        return None
    return read_text(place)


def read_mapping(text: str, name: str, kind: str) -> dict[str, Any]:
    """Return the mapping in a file of JSON or YAML. Raises UserError for anything else, and for a number of YAML that
    64 bits do not hold."""
    if text.lstrip().startswith("{"):
        return parse_object(text, name, kind)
    document = parse_document(text, name)
    for key, value in document.value.items():
        if isinstance(value, float) and 2**63 <= abs(value) < math.inf:
            where = document.where((key,))
            raise UserError(f"{where}: {key}: {value:g} does not fit 64 bits; is a digit too many there?")
    mapping: dict[str, Any] = document.value
    return mapping


def parse_ds_config(text: str, name: str) -> DsConfig:
    """Return the settings of a ds_config.json. Raises UserError for what is none, and for a key that has another form
    than DeepSpeed takes."""
    return ds_config_of(parse_object(text, name, "a ds_config.json"), name)


def ds_config_of(settings: Mapping[str, Any], name: str) -> DsConfig:
    """Return settings whose known keys have the form that DeepSpeed takes. Raises UserError that names another one."""
    try:
        return DsConfig(checked_settings(_with_whole_numbers(settings)))
    except WrongSetting as wrong:
        raise UserError(f"{name}: {wrong}") from None


def _with_whole_numbers(value: Any) -> Any:
    """Return settings in which 5e8 is a whole number, as DeepSpeed takes it."""
    if isinstance(value, dict):
        return {key: _with_whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(item) for item in value]
    if isinstance(value, float) and value == int(value) and abs(value) >= 1000:
        return int(value)
    return value


@dataclass
class DsConfig:
    """The settings of a file, of which those that a recipe has keys for are taken out one after the other."""

    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.settings = copy.deepcopy(self.settings)

    def section(self, name: str) -> dict[str, Any]:
        """Return a section; an empty one where there is none."""
        value = self.settings.get(name)
        return value if isinstance(value, dict) else {}

    def has(self, key: str) -> bool:
        """Return whether a dotted key is written."""
        *sections, name = key.split(".")
        within: Any = self.settings
        for section in sections:
            within = within.get(section) if isinstance(within, dict) else None
        return isinstance(within, dict) and name in within

    def put(self, key: str, value: Any) -> None:
        """Write a dotted key."""
        *sections, name = key.split(".")
        within = self.settings
        for section in sections:
            within = within.setdefault(section, {})
        within[name] = value

    def take(self, key: str) -> Any:
        """Remove a dotted key and return its value; None where it is absent or "auto"."""
        *sections, name = key.split(".")
        within: Any = self.settings
        for section in sections:
            within = within.get(section) if isinstance(within, dict) else None
        value = within.pop(name, None) if isinstance(within, dict) else None
        return None if value == AUTO else value

    def take_whole(self, key: str, place: str) -> int | None:
        """Remove a dotted key and return its whole number. Raises UserError for another value."""
        value = self.take(key)
        number = whole_or_none({key: value}, key)
        if value is not None and number is None:
            raise UserError(f"{place}: {key}: must be a whole number, not {str(value)[:40]!a}; correct it")
        return number

    def rest(self, trainer: bool) -> dict[str, Any]:
        """Return what is left, for `backend.ds_config`; "auto" stays for Hugging Face's Trainer alone."""
        return _without_empty(self.settings, trainer)


def _without_empty(settings: Mapping[str, Any], trainer: bool) -> dict[str, Any]:
    settings_left: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            below = _without_empty(value, trainer)
            if below:
                settings_left[name] = below
        elif value is not None and (trainer or value != AUTO):
            settings_left[name] = value
    return settings_left


def read_zero(config: DsConfig, draft: RecipeDraft, place: str) -> int:
    """Add what the file says of ZeRO and of offload, and return the stage."""
    section = config.section(ZERO)
    for old, new in NAMES_OF_3.items():
        if old in section:
            section[new] = section.pop(old)
    if config.has(f"{ZERO}.stage") and section.get("stage") == AUTO:
        draft.leave_stage_open(f'{place}: {ZERO}.stage: "auto" is filled in by nobody who is read; write the stage')
    stage = config.take_whole(f"{ZERO}.stage", place) or 0
    if not 0 <= stage <= 3:
        raise UserError(f"{place}: {ZERO}.stage: must be 0, 1, 2 or 3, not {stage}; correct it")
    draft.layout["zero_stage"] = stage
    _offload(config, draft, stage)
    if not stage:
        config.settings.pop(ZERO, None)
        return stage
    _tell_of_added(config, draft)
    section = config.settings.setdefault(ZERO, {})
    for name, default in (BUCKETS | BUCKETS_OF_3 if stage == 3 else BUCKETS).items():
        section.setdefault(name, default)
    if stage < 3:
        section.setdefault("overlap_comm", False)  # its default below 3; llmlaunch would write true
        for name in [name for name in section if name.startswith("stage3_")]:
            draft.leave_out((f"{ZERO}.{name}",), f"belongs to stage 3, and the stage is {stage}")
            del section[name]
    return stage


def _tell_of_added(config: DsConfig, draft: RecipeDraft) -> None:
    added = [f"{key} ({reason})" for key, reason in ADDED.items() if not config.has(key)]
    if not draft.layout["offload_optimizer"]:
        added = [text for text in added if not text.startswith("zero_force")]
    if added:
        draft.notes.append(f"rendering adds to ds_config.json: {', '.join(added)}")


def _offload(config: DsConfig, draft: RecipeDraft, stage: int) -> None:
    old = {"cpu_offload": "offload_optimizer", "cpu_offload_params": "offload_param"}
    devices = {new: "cpu" for name, new in old.items() if true_or_false(config.take(f"{ZERO}.{name}"))}
    for name in old.values():
        section = config.section(ZERO).get(name)
        if isinstance(section, dict):
            devices[name] = str(config.take(f"{ZERO}.{name}.device") or "none")
    for name, device in devices.items():
        if device == "nvme":
            draft.notes.append(f"{ZERO}.{name}: states on NVMe are priced and rendered as in host memory")
            for key in ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "fast_init", "pipeline_read"):
                if config.take(f"{ZERO}.{name}.{key}") is not None:
                    draft.leave_out((f"{ZERO}.{name}.{key}",), "belongs to NVMe, where no recipe puts states")
    ratio = config.take(f"{ZERO}.offload_optimizer.ratio")
    moved = devices.get("offload_optimizer", "none") != "none"
    draft.layout["offload_optimizer"] = float(ratio if ratio is not None else 1.0) if moved and stage else 0.0
    draft.layout["offload_parameters"] = devices.get("offload_param", "none") != "none" and stage == 3
    for name in old.values():
        if devices.get(name, "none") == "none" or (name == "offload_param" and stage < 3):
            config.section(ZERO).pop(name, None)
        elif not config.has(f"{ZERO}.{name}.pin_memory"):
            config.put(f"{ZERO}.{name}.pin_memory", False)  # its default; llmlaunch would write true


def read_precision(config: DsConfig) -> str:
    """Return the number format that the file turns on; fp32 where it turns on none."""
    on = [name for name in PRECISIONS if true_or_false(config.take(f"{name}.enabled"))]
    return "fp32" if not on else on[0].replace("bfloat16", "bf16")


def keep_precision(config: DsConfig, precision: str) -> None:
    """Leave out the settings of number formats that are not computed in."""
    for name in PRECISIONS:
        if name != precision:
            config.settings.pop(name, None)


def read_split(config: DsConfig, draft: RecipeDraft, place: str) -> int:
    """Add the sizes of the split that the file says; return how many devices share one replica."""
    sizes = {
        "tensor": config.take_whole("tensor_parallel.autotp_size", place),
        "context": config.take_whole("sequence_parallel_size", place),
        "pipeline": config.take_whole("pipeline.stages", place),
    }
    together = 1
    for name, size in sizes.items():
        if size is not None and size > 1:
            draft.layout[name] = size
            together *= size
    return together


def read_rest(config: DsConfig, draft: RecipeDraft) -> None:
    """Add gradients' format and offloaded checkpoints, and tell of sections that no estimate counts."""
    accumulated = config.take("data_types.grad_accum_dtype")
    if accumulated in ("fp32", "bf16", "bfloat16"):
        draft.training["gradient_dtype"] = "fp32" if accumulated == "fp32" else "bf16"
    if true_or_false(config.take("activation_checkpointing.cpu_checkpointing")):
        if draft.layout.get("recompute") == "full":
            draft.layout["offload_checkpoints"] = True
        else:
            draft.leave_out(("activation_checkpointing.cpu_checkpointing",), "nothing is recomputed")
    unpriced = [name for name in UNPRICED if name in config.settings]
    if unpriced:
        draft.notes.append(f"{', '.join(unpriced)} of ds_config.json: handed on, and not counted in the estimate")


def read_optimizer(config: DsConfig, draft: RecipeDraft) -> None:
    """Add what the file says of optimizer and schedule; both sections are handed on as they are."""
    optimizer, scheduler = config.section("optimizer"), config.section("scheduler")
    params = optimizer.get("params") if isinstance(optimizer.get("params"), dict) else {}
    assert isinstance(params, dict)
    kind = str(optimizer.get("type", "AdamW"))
    if "adam" not in kind.lower():
        draft.notes.append(f"optimizer {kind}: the estimate counts the states of AdamW")
    for key, name in (("learning_rate", "lr"), ("weight_decay", "weight_decay")):
        if isinstance(params.get(name), (int, float)):
            draft.training[key] = params[name]
    betas = params.get("betas")
    if isinstance(betas, list) and len(betas) == 2 and all(isinstance(beta, float) for beta in betas):
        draft.training["adam_betas"] = list(betas)
    settings = scheduler.get("params") if isinstance(scheduler.get("params"), dict) else {}
    assert isinstance(settings, dict)
    if scheduler.get("type") in DECAYS:
        draft.training["learning_rate_decay"] = DECAYS[scheduler["type"]]
        warmup = whole_or_none(settings, "warmup_num_steps")
        if warmup is not None:
            draft.training["warmup_steps"] = warmup
