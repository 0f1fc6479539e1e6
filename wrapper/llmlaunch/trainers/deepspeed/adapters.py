"""What is trained where not all of a model is: adapters beside frozen layers, or the last layers alone."""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

ADAPTER = "default"  # peft's name of the only one


def choose_trained(model: torch.nn.Module, args: argparse.Namespace) -> None:
    """Freezes what is not trained, and puts an adapter beside every linear layer of the blocks where asked."""
    if args.trained_layers:
        model.get_input_embeddings().requires_grad_(False)
        layers_of(model)[: -args.trained_layers].requires_grad_(False)
    if args.adapter_rank:
        adapt(model, args)


def layers_of(model: torch.nn.Module) -> torch.nn.ModuleList:
    """The decoder's layers: the first list of modules of any Transformers model."""
    return next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))


def adapt(model: torch.nn.Module, args: argparse.Namespace) -> None:
    """Low-rank pairs beside all linear layers but the head, their product scaled by 1 (LoRA, Hu et al. 2021); first
    matrices frozen where asked (LoRA-FA, Zhang et al. 2023)."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=args.adapter_rank,
        lora_alpha=args.adapter_rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(args.weights) if args.weights else None,
    )
    torch.manual_seed(args.seed)  # every rank draws the same
    inject_adapter_in_model(config, model, ADAPTER)
    model.adapter_config = config
    if args.frozen_adapter_down:
        for name, parameter in model.named_parameters():
            if ".lora_A." in name:
                parameter.requires_grad = False


def save_adapters(model: torch.nn.Module, folder: Path) -> None:
    """The adapters in peft's own format: PeftModel.from_pretrained reads them. All ranks must call it."""
    config = getattr(model, "adapter_config", None)
    if config is None:
        return
    tensors = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                whole = parameter.detach().cpu().clone()
            tensors[f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"] = whole
    if dist.get_rank() == 0:
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(str(folder))
