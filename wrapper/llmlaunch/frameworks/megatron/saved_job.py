"""What a checkpoint of Megatron-LM or Megatron-Bridge says of the job that saved it, read without running any of it.

Megatron-LM keeps its arguments in the checkpoint: as an object among the tensors ("common_state",
dist_checkpointing/serialization.py save, core 0.19), in common.pt before that, and in the format torch in the file of
each rank. Megatron-Bridge writes its settings next to the tensors, as run_config.yaml (training/checkpointing.py, 0.6).
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Collection, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from llmlaunch.documents.yaml_strict import MAX_BYTES, parse_document
from llmlaunch.errors import UserError
from llmlaunch.findings import first_bytes
from llmlaunch.frameworks.pickle_outline import Outline, first_pickle
from llmlaunch.frozen import frozen

RUN_CONFIG = "run_config.yaml"
COMMON_FILE = "common.pt"
RANK_FILE = "model_optim_rng.pt"
MOST_METADATA_BYTES = 64 * 2**20
MOST_SIZE = 1_000_000_000

# Fields of `Layout`, and what Megatron-LM's arguments and Bridge's model settings call them.
SPLIT_NAMES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "virtual_pipeline": "virtual_pipeline_model_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
}
# Sizes that decide the shapes of tensors, under the names of Megatron-LM's arguments and Bridge's settings alike.
SIZE_NAMES = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size")
SCHEDULE_NAMES = ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps")
EXPERT_NAMES = ("num_experts", "num_moe_experts")
VOCABULARY_NAMES = ("padded_vocab_size", "vocab_size")
EXPERTS, VOCABULARY, PADDING = "num_experts", "vocab_size", "vocab_padding"
USUAL_PADDING = 128  # --make-vocab-size-divisible-by

_COMMON_STATE = b"common_state/shard_0_1"
_FIRST_RANK_FILE = re.compile(r"__0_\d{1,4}\.distcp")
_FIRST_RANK_FOLDER = re.compile(r"mp_rank_00(_000){0,2}")


@frozen
class SavedJob:
    """What a checkpoint says of the job that saved it; what it does not say is None or absent.

    `split` has the fields of `Layout` that say how the model was cut, `sizes` those of the model by Megatron's names.
    `optimizer` is empty and `sharding` None where no optimizer states were saved. `sharding` is how those of the
    distributed optimizer were cut ("dp_reshardable", "fully_reshardable"), empty where there was no such optimizer.
    `schedule` is that of the learning rate: "max_lr", "min_lr", "lr_warmup_steps" and "lr_decay_steps", in samples.
    """

    split: Mapping[str, int]
    sizes: Mapping[str, int]
    optimizer: str = ""
    sharding: str | None = None
    schedule: Mapping[str, float] = field(default_factory=dict)


def megatron_job(folder: Path, names: Collection[str]) -> SavedJob | None:
    """Return what the checkpoint in `folder`, whose entries are `names`, says in Megatron-LM's own words; None where
    it holds no arguments of Megatron-LM, or cannot be read."""
    state = _common_state(folder, names)
    arguments = state.get("args") if isinstance(state, dict) else None
    if not isinstance(arguments, Outline) or not isinstance(arguments.state, dict):
        return None
    values = arguments.state
    saves = values.get("no_save_optim") is not True
    content = state.get("content_metadata")
    return SavedJob(
        split=_split_in(values),
        sizes=sizes_in(values),
        optimizer=_optimizer_in(values) if saves else "",
        sharding=_sharding_in(content) if saves and isinstance(content, dict) else None,
        schedule=_schedule_in(state),
    )


def bridge_job(folder: Path, names: Collection[str]) -> SavedJob | None:
    """Return what the settings say that Megatron-Bridge wrote into `folder`, whose entries are `names`; None where
    there are none, or they cannot be read."""
    text = first_bytes(folder / RUN_CONFIG, MAX_BYTES + 1)
    if text is None or len(text) > MAX_BYTES:
        return None
    try:
        settings = parse_document(text.decode(), RUN_CONFIG).value
    except (UserError, UnicodeDecodeError):
        return None
    model, optimizer, checkpoint = (_section(settings, name) for name in ("model", "optimizer", "checkpoint"))
    if not model or "megatron_mimo_parallelism_config" in model:
        return None
    saves = checkpoint.get("save_optim") is True
    sharding: str | None = None
    if saves and optimizer.get("use_distributed_optimizer") is False:
        sharding = ""
    elif saves and checkpoint.get("ckpt_format") == "torch_dist":  # _build_sharded_state_dict_metadata, 0.6
        fully = checkpoint.get("dist_ckpt_optim_fully_reshardable")
        sharding = None if not isinstance(fully, bool) else "fully_reshardable" if fully else "dp_reshardable"
    return SavedJob(
        split=_split_in(model),
        sizes=sizes_in(model),
        optimizer=_optimizer_in(optimizer) if saves else "",
        sharding=sharding,
        schedule=_schedule_in(_common_state(folder, names)) if saves else {},
    )


def sizes_in(values: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of the model among arguments of Megatron-LM or settings of Bridge's model; those that are not
    there, or no numbers, are left out."""
    sizes = {name: values[name] for name in SIZE_NAMES if _is_size(values.get(name))}
    for name in EXPERT_NAMES:
        if name in values:
            sizes[EXPERTS] = values[name] if _is_size(values[name]) else 0
    for name in VOCABULARY_NAMES:
        if _is_size(values.get(name)):
            sizes[VOCABULARY] = values[name]
            break
    tensor, divisor = values.get(SPLIT_NAMES["tensor"], 1), values.get("make_vocab_size_divisible_by", USUAL_PADDING)
    sizes[PADDING] = tensor * divisor if _is_size(tensor) and _is_size(divisor) else USUAL_PADDING
    return sizes


def _common_state(folder: Path, names: Collection[str]) -> Any:
    """Return what all ranks have in common: of the format torch what the first rank has saved."""
    if COMMON_FILE in names:
        return first_pickle(folder / COMMON_FILE)
    rank = next((name for name in sorted(names) if _FIRST_RANK_FOLDER.fullmatch(name)), None)
    if rank is not None:
        return first_pickle(folder / rank / RANK_FILE)
    offset = _offset_of_common_state(first_bytes(folder / ".metadata", MOST_METADATA_BYTES) or b"")
    if offset is None:
        return None
    for name in sorted(filter(_FIRST_RANK_FILE.fullmatch, names)):
        saved = first_pickle(folder / name, offset)
        if isinstance(saved, list) and len(saved) == 1 and isinstance(saved[0], dict):
            return saved[0]
    return None


def _offset_of_common_state(metadata: bytes) -> int | None:
    """Return where the common state begins in its file, by the first number after the last mention of its name
    (_StorageInfo.offset, torch/distributed/checkpoint/filesystem.py, torch 2.13). The rest may be long, and is not
    read."""
    begin = metadata.rfind(_COMMON_STATE)
    if begin < 0:
        return None
    begin += len(_COMMON_STATE)
    try:
        for count, (instruction, argument, _) in enumerate(pickletools.genops(metadata[begin : begin + 1024])):
            if isinstance(argument, int) and instruction.name in ("BININT", "BININT1", "BININT2", "LONG1"):
                return argument if argument >= 0 else None
            if count == 64:
                break
    except ValueError:
        pass
    return None


def _split_in(values: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of the parallel groups; empty where tensor or pipeline is missing. Those of experts are left out
    of a model without experts."""
    split = {field: values[name] for field, name in SPLIT_NAMES.items() if _is_size(values.get(name))}
    if "tensor" not in split or "pipeline" not in split:
        return {}
    if values.get(SPLIT_NAMES["virtual_pipeline"], 0) is None:
        split["virtual_pipeline"] = 1
    if not _is_size(values.get("num_experts")) and not _is_size(values.get("num_moe_experts")):
        split.pop("expert", None)
        split.pop("expert_tensor", None)
    return split


def _schedule_in(state: Any) -> dict[str, float]:
    """Return the schedule among what all ranks have in common (OptimizerParamScheduler.state_dict, core/
    optimizer_param_scheduler.py, core 0.19)."""
    schedule = state.get("opt_param_scheduler") if isinstance(state, dict) else None
    values = schedule if isinstance(schedule, dict) else {}
    return {name: values[name] for name in SCHEDULE_NAMES if type(values.get(name)) in (int, float)}


def _sharding_in(content: Mapping[str, Any]) -> str | None:
    kind = content.get("distrib_optim_sharding_type", "")
    return kind if isinstance(kind, str) else None


def _optimizer_in(values: Mapping[str, Any]) -> str:
    """Return the name of the optimizer. Megatron-LM calls Muon with a distributed optimizer dist_muon."""
    name = values.get("optimizer")
    return name.removeprefix("dist_") if isinstance(name, str) else ""


def _section(settings: Any, name: str) -> dict[str, Any]:
    section = settings.get(name) if isinstance(settings, dict) else None
    return section if isinstance(section, dict) else {}


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value <= MOST_SIZE
