"""Which DeepSpeed configuration a command reads: a file, or what `accelerate launch` says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from llmlaunch.command_lines.command import TrainerCommand, is_unset
from llmlaunch.command_lines.recipe_draft import RecipeDraft, ScriptOptions, file_text, true_or_false, whole_or_none
from llmlaunch.command_lines.trainers import FSDP, not_read
from llmlaunch.frameworks.deepspeed.read_config import DsConfig, ds_config_of, parse_ds_config, read_mapping

OF_FSDP = ("fsdp", "fsdp_config", "fsdp_transformer_layer_cls_to_wrap")
NOT_READ = {"FSDP": "FSDP of accelerate", "MEGATRON_LM": "Megatron-LM of accelerate"}


def configuration(
    command: TrainerCommand, options: ScriptOptions, draft: RecipeDraft
) -> tuple[DsConfig | None, str | None, str]:
    """Return ds_config.json with the number format that the launcher says and how messages call the file; no settings
    where the command names none, or none that is here: then the draft says that the ZeRO stage is not known.

    Raises:
        NoVerdict: accelerate splits the model in a way that is not read.
    """
    launcher, absent = _accelerate(command, options)
    precision = launcher.get("mixed_precision")
    precision = precision if precision in ("bf16", "fp16") else None
    path = options.path("deepspeed_config") or options.path("deepspeed") or launcher.get("deepspeed_config_file")
    path = path if isinstance(path, str) and path not in ("True", "False", "none") else None
    if path is not None:
        text = file_text(command, path)
        if text is not None:
            return parse_ds_config(text, path), precision, path
        packaged = None if is_unset(path) else _packaged("deepspeed", command.family, path)
        if packaged is not None:
            draft.notes.append(f"{path} is not here; it is taken as {command.family} brings it")
            return ds_config_of(packaged, path), precision, path
        draft.leave_stage_open(_not_here(path, command))
        return None, precision, str(path)
    if options.has("deepspeed_config", "deepspeed"):
        if not options.has("zero_stage"):
            draft.leave_stage_open(f"{command.place} does not say which ds_config.json is read; write the stage")
        return None, precision, "ds_config.json"
    if launcher.get("use_deepspeed") or (absent is not None and "zero_stage" in launcher):
        place = "accelerate's configuration"
        return ds_config_of(_accelerate_settings(launcher), place), precision, place
    if absent is not None:
        draft.leave_stage_open(_not_here(absent, command))
    return None, precision, "ds_config.json"


def _not_here(path: str, command: TrainerCommand) -> str:
    if is_unset(path):
        return f"{path}, which {command.place} reads, has no value in the script; set it, or write the stage"
    return (
        f"{path}, which {command.place} names, is not there below {command.folder.absolute()}; put it there, or write "
        "the stage and what is offloaded"
    )


@cache
def _packages() -> Mapping[str, Any]:
    packages: Mapping[str, Any] = json.loads(Path(__file__).with_name("packaged_configs.json").read_text("utf-8"))
    return packages


def _packaged(kind: str, family: str, path: str) -> dict[str, Any] | None:
    """Return a configuration that a trainer brings with it, by the last part of its path; None for any other."""
    values = _packages()[kind].get(family, {}).get(PurePath(path).name)
    return None if values is None else dict(values)


def is_trl(command: TrainerCommand) -> bool:
    """Return whether a command is TRL's own, which starts `accelerate launch`."""
    return PurePath(command.trainer).name == "trl"


def as_trl_launches(command: TrainerCommand) -> TrainerCommand:
    """Return a command of TRL, which hands its arguments to `accelerate launch`, with the machines and processes that
    they say (trl/cli)."""
    options = ScriptOptions(command.arguments, command.place)
    values = _accelerate_values(command, options) or {}
    nodes = options.whole("num_machines") or whole_or_none(values, "num_machines") or 1
    processes = options.whole("num_processes") or whole_or_none(values, "num_processes")
    devices = processes // nodes if processes else None
    return replace(command, nodes=nodes, devices_per_node=devices or command.devices_per_node)


def _accelerate_values(command: TrainerCommand, options: ScriptOptions) -> dict[str, Any] | None:
    """Return what the file of accelerate says that a command names, one that TRL brings with it included; nothing where
    it names none, None where the file is not here."""
    path = _accelerate_path(command, options)
    if path is None:
        return {}
    text = None if is_unset(path) else file_text(command, path)
    if text is not None:
        return read_mapping(text, path, "accelerate's configuration")
    return None if is_unset(path) else _packaged("accelerate", command.family, path)


def _accelerate_path(command: TrainerCommand, options: ScriptOptions) -> str | None:
    of_trl = options.path("accelerate_config") if is_trl(command) else None
    path = of_trl or (command.launcher_options.get("config_file") if command.launcher == "accelerate" else None)
    return path if isinstance(path, str) else None


def _accelerate(command: TrainerCommand, options: ScriptOptions) -> tuple[Mapping[str, Any], str | None]:
    """Return what `accelerate launch` says: its options over those of its file, DeepSpeed's beside the others; and the
    path of that file where it is not here."""
    stated: dict[str, Any] = dict(command.launcher_options)
    of_trl = is_trl(command)
    if not of_trl and command.launcher != "accelerate":
        return stated, None
    if of_trl:
        options.take("accelerate_config")
    values = _accelerate_values(command, options)
    if values is None:
        return _with_kind(stated, command), _accelerate_path(command, options)
    below = values.get("deepspeed_config")
    return _with_kind({**values, **(below if isinstance(below, dict) else {}), **stated}, command), None


def _with_kind(values: Mapping[str, Any], command: TrainerCommand) -> dict[str, Any]:
    """Return what accelerate says with `use_deepspeed` as its file or its options decide it. Raises NoVerdict for a
    kind of training that is not read."""
    kind = str(values.get("distributed_type", "")).upper()
    for name, chosen in (("use_deepspeed", "DEEPSPEED"), ("use_fsdp", "FSDP"), ("use_megatron_lm", "MEGATRON_LM")):
        kind = chosen if true_or_false(values.get(name) or False) else kind
    if kind in NOT_READ:
        raise not_read(NOT_READ[kind], command.place)
    return {**values, "use_deepspeed": kind == "DEEPSPEED"}


def _accelerate_settings(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ds_config that accelerate makes of its own options (its utils/dataclasses.py DeepSpeedPlugin)."""
    stage = str(section.get("zero_stage", 2))
    zero: dict[str, Any] = {"stage": int(stage) if stage in ("0", "1", "2", "3") else stage}
    for name, key in (("offload_optimizer", "offload_optimizer_device"), ("offload_param", "offload_param_device")):
        zero[name] = {"device": str(section.get(key) or "none")}
    if true_or_false(section.get("zero3_save_16bit_model", False)):
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    settings: dict[str, Any] = {"zero_optimization": zero, "gradient_clipping": "auto"}
    return settings


def read_fsdp(command: TrainerCommand, options: ScriptOptions, draft: RecipeDraft) -> bool:
    """Read the Trainer's own split by FSDP's full_shard, and return whether there is one. Raises NoVerdict for another
    kind of FSDP."""
    words = " ".join(options.values("fsdp") or ()).replace(",", " ").split()
    if not words or true_or_false(words[0]) is False:
        return False
    if not {"full_shard"} <= set(words) <= {"full_shard", "auto_wrap"}:
        raise not_read(FSDP, command.place)
    draft.layout["zero_stage"] = 3
    options.take(*OF_FSDP)
    reason = "the recipe splits by DeepSpeed's ZeRO 3, which keeps about as much as FSDP's full_shard"
    draft.leave_out(options.written(*OF_FSDP), reason)
    return True
