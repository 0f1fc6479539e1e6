"""A model with the weights of a Hugging Face checkpoint: config.json and safetensors in a folder."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from group import refuse
from parallel import RankSplit, attention_of

# What the recipe decides of a model whose weights are given; all else the checkpoint's own configuration says.
TRAINING_KEYS = ("output_router_logits", "router_aux_loss_coef", "attention_dropout", "max_position_embeddings")


def load_model(
    folder: Path,
    described: Any,
    settings: dict[str, Any],
    dtype: torch.dtype,
    split: RankSplit,
    base: str | None = None,
) -> torch.nn.Module:
    """The model on its device. `described` is the recipe's configuration: the job ends where its shapes differ. With a
    `base`, linear layers but the head are quantized as they are loaded (QLoRA, Dettmers et al. 2023)."""
    if not (folder / "config.json").is_file():
        refuse(f"--weights {folder}: holds no config.json; name a Hugging Face checkpoint folder")
    own = AutoConfig.from_pretrained(folder)
    refuse_other_shapes(folder, described, own)
    for key in TRAINING_KEYS:
        if hasattr(described, key):
            setattr(own, key, getattr(described, key))
    # from_pretrained asks it whether to split each module as soon as it is made: it must live until then
    zero_config = HfDeepSpeedConfig(settings) if split.tensor == 1 else None
    device = get_accelerator().current_device_name()
    narrow = {} if base is None else {"quantization_config": quantization(dtype), "device_map": {"": device}}
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, config=own, dtype=dtype, attn_implementation=attention_of(own), output_loading_info=True, **narrow
        )
    except (OSError, RuntimeError, ValueError) as error:
        refuse(f"--weights {folder}: cannot be loaded: {error}")
    if report["missing_keys"]:
        refuse(f"--weights {folder}: lacks {len(report['missing_keys'])} tensors, {min(report['missing_keys'])} first")
    if base is None and (zero_config is None or not zero_config.is_zero3()):
        model.to(device)
    return model


def quantization(dtype: torch.dtype) -> BitsAndBytesConfig:
    """Four bits a weight, with quantized scales; products are of `dtype`."""
    if importlib.util.find_spec("bitsandbytes") is None:
        refuse("--adapter-base: weights are quantized with the package bitsandbytes, which is not installed")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def refuse_other_shapes(folder: Path, described: Any, own: Any) -> None:
    """Ends the job where the recipe's model, for which the job was planned, is not the checkpoint's."""
    planned, actual = shapes(described), shapes(own)
    different = [name for name in (*planned, *actual) if planned.get(name) != actual.get(name)]
    if different:
        name = different[0]
        refuse(
            f"--weights {folder}: is another model than the recipe's: {name} is {shape_text(actual.get(name))} in the "
            f"checkpoint and {shape_text(planned.get(name))} in the recipe; name the checkpoint's model in the recipe"
        )


def shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter. Nothing is allocated."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def shape_text(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else "x".join(map(str, shape))
