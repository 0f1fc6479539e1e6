"""A model with the weights of a Hugging Face checkpoint: config.json and safetensors in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from group import refuse
from parallel import RankSplit, attention_of

# What the recipe decides of a model whose weights are given; all else the checkpoint's own configuration says.
TRAINING_KEYS = ("output_router_logits", "router_aux_loss_coef", "attention_dropout", "max_position_embeddings")


def load_model(
    folder: Path, described: Any, settings: dict[str, Any], dtype: torch.dtype, split: RankSplit
) -> torch.nn.Module:
    """The model on its device. `described` is the recipe's configuration: the job ends where its shapes differ."""
    if not (folder / "config.json").is_file():
        refuse(f"--weights {folder}: holds no config.json; name a Hugging Face checkpoint folder")
    own = AutoConfig.from_pretrained(folder)
    refuse_other_shapes(folder, described, own)
    for key in TRAINING_KEYS:
        if hasattr(described, key):
            setattr(own, key, getattr(described, key))
    # from_pretrained asks it whether to split each module as soon as it is made: it must live until then
    zero_config = HfDeepSpeedConfig(settings) if split.tensor == 1 else None
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, config=own, dtype=dtype, attn_implementation=attention_of(own), output_loading_info=True
        )
    except (OSError, RuntimeError, ValueError) as error:
        refuse(f"--weights {folder}: cannot be loaded: {error}")
    if report["missing_keys"]:
        refuse(f"--weights {folder}: lacks {len(report['missing_keys'])} tensors, {min(report['missing_keys'])} first")
    if zero_config is None or not zero_config.is_zero3():
        model.to(get_accelerator().current_device_name())
    return model


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
