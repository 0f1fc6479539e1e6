"""What a Megatron-LM namespace trains, for how long and on which data, as a recipe writes it: the inverse of
frameworks/megatron/training_arguments.py and number_formats.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

from llmlaunch.documents.keys import key_names
from llmlaunch.frameworks.megatron.namespace import Namespace
from llmlaunch.recipe.datasets import SHARES, WITHOUT_MODEL, Data, TokenizerType
from llmlaunch.recipe.training import Training

__all__ = ["missing_data", "missing_training", "read_data", "read_tracking", "read_training"]

# By `dest`: the key under `training:` and its default, which is not written.
PLAIN: tuple[tuple[str, str, Any], ...] = (
    ("lr", "learning_rate", None),
    ("min_lr", "minimum_learning_rate", 0.0),
    ("weight_decay", "weight_decay", 0.1),
    ("clip_grad", "gradient_clipping", 1.0),
    ("seed", "seed", 1234),
    ("log_interval", "log_interval", 10),
    ("tensorboard_dir", "tensorboard", None),
)
WANDB_NAME = re.compile(r"[^/\\#?%:,]{1,128}")
MOST = 10**9
MASK_BYTES_TOLD = 2**28  # of one sequence: 16,384 tokens
DECAYS = ("linear", "cosine", "constant")
FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
DEFAULT_BETAS = [0.9, 0.95]


def missing_training(space: Namespace) -> Iterator[str]:
    """Yield a sentence for each length or size of the batch that these values do not tell."""
    if not space.get("seq_length"):
        yield "training.sequence_length: --seq-length is not given; write training.sequence_length"
    if not space.get("global_batch_size"):
        yield "training.global_batch_size: --global-batch-size is not given; write training.global_batch_size"
    if not space.get("train_iters"):
        yield "training.steps: neither --train-iters nor --train-samples is given; write training.steps"


def read_training(space: Namespace) -> tuple[dict[str, Any], list[str]]:
    """Return the mapping `training:` and notes."""
    training: dict[str, Any] = {}
    for dest, key in (
        ("seq_length", "sequence_length"),
        ("global_batch_size", "global_batch_size"),
        ("train_iters", "steps"),
    ):
        if space.get(dest):
            training[key] = space[dest]
    notes = list(_length_notes(space))
    training["precision"] = next((name for name in ("bf16", "fp16") if space.get(name)), "fp32")
    training |= dict(_numbers(space))
    decay = space.get("lr_decay_style")
    if decay in DECAYS and decay != "cosine":
        training["learning_rate_decay"] = decay
    for dest, key, default in PLAIN:
        value = space.get(dest)
        if value is not None and value != default and not (key == "minimum_learning_rate" and decay == "constant"):
            training[key] = value
    betas = [space.get("adam_beta1"), space.get("adam_beta2")]
    if betas != DEFAULT_BETAS:
        training["adam_betas"] = betas
    training |= dict(_warmup(space, notes))
    training |= dict(_checkpoints(space))
    if "evaluation" in key_names(Training) and _evaluates(space):
        training["evaluation"] = {"interval": space["eval_interval"], "iterations": space["eval_iters"]}
    return training, notes


def _evaluates(space: Namespace) -> bool:
    """Return whether there is something to evaluate, and data that it is evaluated on."""
    if not (space.get("eval_interval") or 0) > 0 or not (space.get("eval_iters") or 0) > 0:
        return False
    if space["eval_interval"] > MOST or space["eval_iters"] > MOST:
        return False
    shares = str(space.get("split") or "").split(",")
    apart = bool(space.get("valid_data_path")) or len(shares) < 2 or _weight(shares[1]) is not None
    return bool(space.get("mock_data")) or apart


def _length_notes(space: Namespace) -> Iterator[str]:
    if "train_iters" in space.converted:
        yield f"training.steps: {space['train_iters']} steps see the samples that --train-samples names"
    if space.get("rampup_batch_size"):
        yield "training.global_batch_size: is that after --rampup-batch-size, which stays an extra argument"


def _warmup(space: Namespace, notes: list[str]) -> Iterator[tuple[str, int]]:
    warmup, steps = space.get("lr_warmup_iters") or 0, space.get("train_iters") or 0
    if steps and warmup >= steps:
        notes.append(f"training.warmup_steps: {warmup} of {steps} steps leave none after the warm-up; {steps - 1} here")
        warmup = steps - 1
    yield "warmup_steps", warmup


def _numbers(space: Namespace) -> Iterator[tuple[str, Any]]:
    if space.get("fp8") and space.get("bf16"):
        recipe = space.get("fp8_recipe") or "delayed"
        if recipe in FP8_RECIPES:
            yield "fp8", recipe
            if space.get("fp8_param_gather"):
                yield "fp8_parameters", True
    if space.get("fp4") and space.get("bf16"):
        yield "fp4", "nvfp4"
    if space.get("optimizer") in ("muon", "dist_muon"):
        yield "optimizer", "muon"
    elif space.get("use_precision_aware_optimizer") and not space.get("optimizer_cpu_offload"):
        formats = {
            "main_parameters": space.get("main_params_dtype"),
            "first_moment": space.get("exp_avg_dtype"),
            "second_moment": space.get("exp_avg_sq_dtype"),
        }
        yield "optimizer", {key: value for key, value in formats.items() if value not in (None, "fp32")}
    if space.get("bf16") and (
        space.get("grad_reduce_in_bf16") or space.get("megatron_fsdp_main_grads_dtype") == "bf16"
    ):
        yield "gradient_dtype", "bf16"
    elif space.get("fp16") and space.get("accumulate_allreduce_grads_in_fp32"):
        yield "gradient_dtype", "fp32"


def _checkpoints(space: Namespace) -> Iterator[tuple[str, Any]]:
    save, load, interval = space.get("save"), space.get("load"), space.get("save_interval")
    if save and interval:
        yield "save_interval", interval
        yield "checkpoint_path", save
        often, kind = space.get("non_persistent_save_interval"), space.get("ckpt_format")
        if often and often < interval and space.get("non_persistent_ckpt_type") == "global" and kind == "torch_dist":
            yield "non_persistent_save_interval", often
        whole = kind == "torch" and not space.get("use_distributed_optimizer")
        sharded = bool(space.get("use_megatron_fsdp"))
        if whole or (kind == "fsdp_dtensor" and not sharded):
            yield "checkpoint_format", kind
        if (
            space.get("async_save")
            and space.get("use_persistent_ckpt_worker")
            and space.get("async_strategy") == "mcore"
        ):
            yield "async_save", True
    start = space.get("pretrained_checkpoint") or (load if space.get("finetune") and load != save else None)
    if start:
        yield "start_from", start


def read_tracking(space: Namespace) -> dict[str, Any] | None:
    """Return the mapping `tracking:` of a run of Weights & Biases, or None."""
    names = {
        "project": "wandb_project",
        "entity": "wandb_entity",
        "name": "wandb_exp_name",
        "save_dir": "wandb_save_dir",
    }
    run = {key: str(space[dest]) for key, dest in names.items() if space.get(dest)}
    if not all(WANDB_NAME.fullmatch(run.get(key, "x")) for key in ("project", "entity")) or "project" not in run:
        return None
    return {"wandb": run}


def missing_data(space: Namespace) -> Iterator[str]:
    """Yield a sentence where these values do not tell what is trained on."""
    if space.get("mock_data") or space.get("data_path") or space.get("train_data_path"):
        return
    file = space.get("data_args_path") or space.get("per_split_data_args_path")
    if file:
        yield f"data: stands in {ascii(file)[1:-1]}, which is not read; write data.path or data.blend"
    else:
        yield "data: no --data-path is given; write data.path, data.blend or data: {mock: true}"


def read_data(space: Namespace) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the mapping `data:`, or None where these values do not tell its source, and notes."""
    if space.get("mock_data"):
        return {"mock": True, **_masks(space)}, []
    prefixes = [str(word) for word in space.get("data_path") or space.get("train_data_path") or ()]
    data = _blend(prefixes) if prefixes else {}
    data |= _masks(space)
    notes = []
    split = str(space.get("split") or "")
    shares = f"{split},0" if split.count(",") == 1 else split
    if not space.get("train_data_path") and SHARES.fullmatch(shares):
        data["split"] = shares
    if space.get("data_cache_path"):
        data["cache_path"] = space["data_cache_path"]
    kind, name = space.get("tokenizer_type"), space.get("tokenizer_model")
    if kind in WITHOUT_MODEL:
        data |= {"tokenizer_type": kind} if kind != "NullTokenizer" else {}
    elif kind in get_args(TokenizerType) and name:
        data |= {"tokenizer": name} | ({"tokenizer_type": kind} if kind != "HuggingFaceTokenizer" else {})
    elif kind is not None:
        notes.append(
            f"data.tokenizer_type: {ascii(kind)[1:-1]} is none that a recipe names; the tokens are read as numbers"
        )
    valid = [str(word) for word in space.get("valid_data_path") or ()]
    if valid and "validation" in key_names(Data) and _evaluates(space):
        source = _blend(valid)
        data["validation"] = source.get("path") or source["blend"]
    return data if prefixes else None, notes


def _masks(space: Namespace) -> dict[str, bool]:
    """Return that the loader makes attention masks, where they are large enough to matter: rendering spares smaller
    ones."""
    length = space.get("seq_length") or 0
    made = space.get("create_attention_mask_in_dataloader") and not space.get("dataloader_inter_document_masking")
    return {"attention_masks": True} if made and length**2 >= MASK_BYTES_TOLD else {}


def _blend(prefixes: list[str]) -> dict[str, Any]:
    """One dataset, or several with their weights before them (get_blend_from_list, core/datasets/utils.py, core 0.19);
    without weights each counts the same."""
    if len(prefixes) == 1:
        return {"path": prefixes[0]}
    pairs = list(zip(prefixes[::2], prefixes[1::2], strict=False))
    if len(prefixes) % 2 == 0 and all(_weight(weight) is not None for weight, _ in pairs):
        parts = [{"path": path, "weight": _weight(weight)} for weight, path in pairs]
    else:
        parts = [{"path": path, "weight": 1.0} for path in prefixes]
    return {"blend": parts} if len(parts) > 1 else {"path": parts[0]["path"]}


def _weight(word: str) -> float | None:
    return (
        float(word) if re.fullmatch(r"\d{1,12}(\.\d+)?|\.\d+|\d(\.\d+)?e-?\d{1,2}", word) and float(word) > 0 else None
    )
