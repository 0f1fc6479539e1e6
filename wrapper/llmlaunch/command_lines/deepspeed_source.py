"""Which DeepSpeed configuration a command reads: a file, or what `accelerate launch` says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmlaunch.command_lines.command import TrainerCommand, is_unset
from llmlaunch.command_lines.deepspeed_config import DsConfig, file_text, parse_ds_config, read_mapping
from llmlaunch.command_lines.options import ScriptOptions, true_or_false
from llmlaunch.command_lines.recipe_draft import RecipeDraft

__all__ = ["configuration"]


def configuration(
    command: TrainerCommand, options: ScriptOptions, draft: RecipeDraft
) -> tuple[DsConfig | None, str | None, str]:
    """Return ds_config.json with the number format that the launcher says and how messages call the file; no settings
    where the command names none, or none that is here."""
    launcher = _accelerate(command, draft)
    precision = launcher.get("mixed_precision")
    precision = precision if precision in ("bf16", "fp16") else None
    path = options.path("deepspeed_config") or options.path("deepspeed") or launcher.get("deepspeed_config_file")
    path = path if isinstance(path, str) and path not in ("True", "False", "none") else None
    if path is not None:
        text = file_text(command, path)
        if text is not None:
            return parse_ds_config(text, path), precision, path
        draft.lack(
            "layout.zero_stage",
            f"{path} is not there below {command.folder.absolute()}; write the stage and what is offloaded",
        )
        return None, precision, str(path)
    if options.has("deepspeed_config", "deepspeed"):
        if not options.has("zero_stage"):
            draft.lack("layout.zero_stage", "which ds_config.json is read is not known; write the stage")
        return None, precision, "ds_config.json"
    section = launcher if launcher.get("use_deepspeed") else None
    if section is None:
        return None, precision, "ds_config.json"
    return DsConfig(_accelerate_settings(section)), precision, "accelerate's configuration"


def _accelerate(command: TrainerCommand, draft: RecipeDraft) -> Mapping[str, Any]:
    """Return what `accelerate launch` says: its options over those of its file, DeepSpeed's beside the others."""
    stated: dict[str, Any] = dict(command.launcher_options)
    path = stated.get("config_file")
    if command.launcher != "accelerate" or not isinstance(path, str) or is_unset(path):
        return stated
    text = file_text(command, path)
    if text is None:
        draft.lack("layout.zero_stage", f"{path} of accelerate is not there; write the stage and what is offloaded")
        return stated
    values = read_mapping(text, path, "accelerate's configuration")
    below = values.get("deepspeed_config")
    values |= below if isinstance(below, dict) else {}
    values["use_deepspeed"] = str(values.get("distributed_type", "")).upper() == "DEEPSPEED"
    return values | stated


def _accelerate_settings(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ds_config that accelerate makes of its own options (its utils/dataclasses.py DeepSpeedPlugin)."""
    zero: dict[str, Any] = {"stage": section.get("zero_stage", 2)}
    stage = str(zero["stage"])
    zero["stage"] = int(stage) if stage in ("0", "1", "2", "3") else stage
    for name, key in (("offload_optimizer", "offload_optimizer_device"), ("offload_param", "offload_param_device")):
        zero[name] = {"device": str(section.get(key) or "none")}
    if true_or_false(section.get("zero3_save_16bit_model", False)):
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    settings: dict[str, Any] = {"zero_optimization": zero, "gradient_clipping": "auto"}
    return settings
