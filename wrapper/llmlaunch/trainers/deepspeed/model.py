"""The model a Hugging Face configuration describes, its engine, and the loss of one micro-batch."""

from __future__ import annotations

import argparse
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from transformers import AutoConfig, AutoModelForCausalLM

from adapters import choose_trained
from techniques import apply_techniques

INITIAL_STANDARD_DEVIATION = 0.02


def compute_dtype(settings: dict[str, Any]) -> torch.dtype:
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if settings.get(name, {}).get("enabled"):
            return dtype
    return torch.float32


def build_model(config: dict[str, Any], settings: dict[str, Any], args: argparse.Namespace) -> torch.nn.Module:
    """The model on its device, with the same initial weights for every ZeRO stage and number of ranks.

    ZeRO 3 splits each module as soon as it is made; the other stages make it whole, in the compute precision.
    """
    split = settings.get("zero_optimization", {}).get("stage", 0) == 3
    device = torch.device(get_accelerator().current_device_name())
    with deepspeed.zero.Init(config_dict_or_path=settings) if split else device:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), attn_implementation=attention(config), dtype=compute_dtype(settings)
        )
        choose_trained(model, args)
    generator = torch.Generator(device).manual_seed(args.seed)
    norm = 0.0 if config["model_type"].startswith("gemma") else 1.0  # Gemma multiplies by 1 + weight
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=split):
            if not split or dist.get_rank() == 0:
                initialise(name, parameter.data, generator, norm)
    return model


def attention(config: dict[str, Any]) -> str:
    """torch's fused attention has no cap on scores (`_supports_sdpa` of Gemma 2)."""
    return "sdpa" if config.get("attn_logit_softcapping") is None else "eager"


def initialise(name: str, weights: torch.Tensor, generator: torch.Generator, norm: float) -> None:
    """Biases and the second matrices of adapters 0, weights of norms `norm`, other matrices normal."""
    if name.endswith(("bias", ".adapter_up.weight")):
        weights.zero_()
    elif weights.dim() == 1:
        weights.fill_(norm)
    else:
        weights.normal_(0.0, INITIAL_STANDARD_DEVIATION, generator=generator)


def build_engine(args: argparse.Namespace, config: dict[str, Any], settings: dict[str, Any]) -> Any:
    """The DeepSpeed engine of the model `config` describes, under the ds_config `settings`."""
    model = build_model(config, settings, args)
    model.config.use_cache = False
    apply_techniques(model, settings, args)
    # DeepSpeed casts buffers to the compute precision, and rotary frequencies do not survive bf16.
    exact = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=args.learning_rate, betas=tuple(args.adam_betas), weight_decay=args.weight_decay, fused=True
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=trained, config=settings)
    for name, buffer in engine.module.named_buffers():
        if name in exact:
            buffer.data = exact[name].to(engine.device)
    engine.train()
    return engine


def micro_batch_loss(engine: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token, and Mixtral's load-balancing loss where the model has one."""
    if getattr(engine.module, "returns_loss", False):
        return engine(input_ids=tokens[:, :-1], targets=tokens[:, 1:])
    outputs = engine(input_ids=tokens[:, :-1])
    loss = F.cross_entropy(outputs.logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    balance = getattr(outputs, "aux_loss", None)
    if balance is not None:
        loss = loss + engine.module.config.router_aux_loss_coef * balance
    return loss
