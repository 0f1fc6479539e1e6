"""The trained model as Hugging Face has it: config.json, safetensors, tokenizer and chat template in a new folder."""

from __future__ import annotations

import argparse
import copy
import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from adapters import ADAPTER, save_adapters
from checkpoints import flush
from group import refuse, report
from parallel import RankSplit

ORIGIN = "trained.json"  # only a folder that has one is replaced
# of weights.TRAINING_KEYS: what the recipe decided for training alone
FOR_TRAINING = ("output_router_logits", "router_aux_loss_coef", "attention_dropout")


def add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--export", type=Path, metavar="FOLDER", help="write the model there after the last step")
    parser.add_argument(
        "--keep-adapters-apart", action="store_true", help="export adapters alone, as PEFT reads them, not merged"
    )


def check_target(args: argparse.Namespace) -> None:
    """Before anything is trained: a folder that is no earlier export stays as it is."""
    target = args.export
    if target is not None and target.exists() and not (target / ORIGIN).is_file():
        refuse(f"--export {target}: is there already and was not exported by this script; name a new folder")


def export(engine: Any, args: argparse.Namespace, step: int, split: RankSplit) -> None:
    """Writes the folder beside its place and renames it when it is whole. All ranks must call it."""
    report(f"exporting step {step}")
    fresh = args.export.with_name(f".{args.export.name}.new")
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
    if args.keep_adapters_apart:
        save_adapters(engine.module, fresh)
    else:
        tensors = whole_tensors(engine.module, split)
        if first:
            save_model(engine.module, tensors, args, fresh)
    if first:
        save_tokenizer(args, fresh)
        (fresh / ORIGIN).write_text(json.dumps({"step": step, "of": args.steps}) + "\n", encoding="utf-8")
        for path in fresh.iterdir():
            flush(path)
        former = args.export.with_name(f".{args.export.name}.old")
        shutil.rmtree(former, ignore_errors=True)
        if args.export.exists():
            args.export.rename(former)
        fresh.rename(args.export)
        shutil.rmtree(former, ignore_errors=True)
    dist.barrier()
    report(f"exported step {step} to {args.export}")


def whole_tensors(model: torch.nn.Module, split: RankSplit) -> dict[str, torch.Tensor]:
    """The model's parameters and buffers by the names they have without adapters, on rank 0; their products are added
    to the weights beside them."""
    first = dist.get_rank() == 0
    tensors: dict[str, torch.Tensor] = {}
    known: dict[int, torch.Tensor] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name.endswith((f"lora_A.{ADAPTER}", f"lora_B.{ADAPTER}", "lora_dropout", "base_layer")):
            continue
        adapted = hasattr(module, "lora_A") and ADAPTER in module.lora_A
        parameters = list(module.parameters(recurse=adapted))
        split_here = any(hasattr(parameter, "ds_id") for parameter in parameters)
        with ExitStack() as gathered:
            # as engine.py `_zero3_consolidated_16bit_state_dict` nests them, 0.19.8
            gathered.enter_context(deepspeed.zero.GatheredParameters(parameters, enabled=split_here))
            if split.tensor > 1:
                from deepspeed.module_inject.layers import GatherReplacedLayerParams

                gathered.enter_context(GatherReplacedLayerParams(parameters, module))
            if not first:
                continue
            owner = module.base_layer if adapted else module
            for own, tensor in [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]:
                if own in owner._non_persistent_buffers_set:
                    continue
                whole = known.get(id(tensor))  # tied weights stay one tensor
                if whole is None:
                    whole = wide(tensor).detach().to("cpu", copy=True)
                    if adapted and own == "weight":
                        whole = (whole.float() + product(module)).to(whole.dtype)
                    known[id(tensor)] = whole
                tensors[f"{name}.{own}" if name else own] = whole
    return tensors


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in its compute format: what a 4-bit weight stands for, beside which its adapter was trained."""
    state = getattr(tensor, "quant_state", None)
    if state is None:
        return tensor
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(tensor.data, state)


def product(layer: Any) -> torch.Tensor:
    """What an adapter adds to its layer's weight, in fp32 (peft/tuners/lora/layer.py `get_delta_weight`, 0.21)."""
    up, down = (matrix[ADAPTER].weight.detach().float().cpu() for matrix in (layer.lora_B, layer.lora_A))
    added = (up @ down) * layer.scaling[ADAPTER]
    return added.T if layer.fan_in_fan_out else added


def save_model(model: Any, tensors: dict[str, torch.Tensor], args: argparse.Namespace, folder: Path) -> None:
    config, dtype = copy.deepcopy(model.config), model.get_input_embeddings().weight.dtype
    config.use_cache = True
    if hasattr(config, "quantization_config"):  # what is written is wide
        del config.quantization_config
    generation = None
    if args.weights:
        own = AutoConfig.from_pretrained(args.weights)
        for name in FOR_TRAINING:
            if hasattr(own, name):
                setattr(config, name, getattr(own, name))
        if hasattr(own, "max_position_embeddings"):
            config.max_position_embeddings = max(own.max_position_embeddings, config.max_position_embeddings)
        if (args.weights / "generation_config.json").is_file():
            generation = GenerationConfig.from_pretrained(args.weights)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if generation is not None:
        empty.generation_config = generation
    empty.save_pretrained(folder, state_dict=tensors)


def save_tokenizer(args: argparse.Namespace, folder: Path) -> None:
    name = args.tokenizer or args.weights
    if name is None:
        return
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):  # weights without one, whose every byte was a token
        return
    if args.chat_template:
        tokenizer.chat_template = Path(args.chat_template).read_text(encoding="utf-8")
    tokenizer.save_pretrained(folder)
