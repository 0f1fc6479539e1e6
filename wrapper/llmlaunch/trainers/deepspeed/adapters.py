"""What is trained where not all of a model is: adapters beside frozen layers, or the last layers alone."""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

ADAPTER = "default"  # peft's name of the only one
# Linear layers by the names that most families have, each with how it ends in those that fuse some of them (Phi-3 and
# GPT-2), have latents (DeepSeek), or other names for what puts out what is mixed (LFM2, both projections of whose
# convolutions are among these) and for an MLP.
TARGETS = {
    "q_proj": ("q_proj", "qkv_proj", "attn.c_attn", "q_a_proj", "q_b_proj"),
    "k_proj": ("k_proj", "qkv_proj", "attn.c_attn", "kv_a_proj_with_mqa", "kv_b_proj"),
    "v_proj": ("v_proj", "qkv_proj", "attn.c_attn", "kv_a_proj_with_mqa", "kv_b_proj"),
    "o_proj": ("o_proj", "attn.c_proj", "self_attn.out_proj", "conv.in_proj", "conv.out_proj"),
    "gate_proj": ("gate_proj", "gate_up_proj", "feed_forward.w1"),
    "up_proj": ("up_proj", "gate_up_proj", "mlp.c_fc", "feed_forward.w3"),
    "down_proj": ("down_proj", "mlp.c_proj", "feed_forward.w2"),
}


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
    """Low-rank pairs beside all linear layers but the head, or those asked for, their product scaled by 1 (LoRA, Hu et
    al. 2021); first matrices frozen where asked (LoRA-FA, Zhang et al. 2023)."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=args.adapter_rank,
        lora_alpha=args.adapter_rank,
        target_modules=targets_in(model, args.adapter_targets) if args.adapter_targets else "all-linear",
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


def is_quantized(model: torch.nn.Module) -> bool:
    """Whether frozen weights are in 4 bits: every start quantizes them anew, so that no checkpoint holds them."""
    return bool(getattr(model, "is_loaded_in_4bit", False))


def targets_in(model: torch.nn.Module, names: list[str]) -> list[str]:
    """How the names of the asked linear layers end in this model."""
    ends = {end for name in names for end in TARGETS[name]}
    there = [name for name, _ in model.named_modules()]
    return sorted(end for end in ends if any(name.endswith(f".{end}") for name in there))


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
