"""The model a Hugging Face configuration describes, its engine, and the loss of one micro-batch."""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from adapters import choose_trained
from data import Batch
from group import refuse
from parallel import RankSplit, attention_of, check_model, share_sequences, tensor_groups
from techniques import apply_techniques
from weights import load_model

try:
    from transformers.initialization import no_init_weights
except ImportError:  # before Transformers 5
    from transformers.modeling_utils import no_init_weights

Json = dict[str, Any]


def compute_dtype(settings: Json) -> torch.dtype:
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if settings.get(name, {}).get("enabled"):
            return dtype
    return torch.float32


def stage_of(settings: Json) -> int:
    return int(settings.get("zero_optimization", {}).get("stage", 0))


def build_model(config: Json, settings: Json, args: argparse.Namespace, split: RankSplit) -> torch.nn.Module:
    """The model on its device, with the same first weights for every ZeRO stage and any number of ranks."""
    described = describe(config)
    check_model(described, split, args.sequence_length)
    refuse_slow_mixers(described)
    if args.adapter_rank and split.tensor > 1:
        # AutoTP takes peft's layer for the linear one it wraps and drops the adapter (auto_tp.py `_replace_module`)
        refuse("--adapter-rank: adapters cannot be split with tensor_parallel; use ZeRO 3 or train the whole model")
    if args.adapter_base and stage_of(settings) == 3:
        refuse("--adapter-base: quantized weights cannot be split; set zero_optimization.stage to 2 or less")
    if args.weights:
        model = load_model(args.weights, described, settings, compute_dtype(settings), split, args.adapter_base)
    else:
        model = new_model(described, settings, args.seed, split)
    model.config.use_cache = False
    choose_trained(model, args)
    return model


def refuse_slow_mixers(described: Any) -> None:
    """Ends a job on GPUs whose Mamba-2 mixers would be computed in torch, in several times the memory that is planned
    (transformers/integrations/hub_kernels.py use_kernel_func_from_hub_with_fallback, 5.23)."""
    missing = [name for name in ("mamba_ssm", "causal_conv1d") if importlib.util.find_spec(name) is None]
    if hasattr(described, "mamba_d_state") and missing and torch.cuda.is_available():
        refuse(f"--model: {' and '.join(missing)} must be installed for its Mamba-2 mixers")


def describe(config: Json) -> Any:
    """The configuration as Transformers has it."""
    try:
        return AutoConfig.for_model(**config)
    except (ValueError, KeyError) as error:
        refuse(f"--model: Transformers cannot build it: {error}")


def new_model(described: Any, settings: Json, seed: int, split: RankSplit) -> torch.nn.Module:
    """A model with first weights as its family draws them.

    ZeRO 3 splits each module as soon as it is made; the other stages make it whole, in the compute precision. So does
    ZeRO 3 where AutoTP cuts whole layers.
    """
    partition = stage_of(settings) == 3 and split.tensor == 1
    device = torch.device(get_accelerator().current_device_name())
    with no_init_weights(), deepspeed.zero.Init(config_dict_or_path=settings) if partition else device:
        model = AutoModelForCausalLM.from_config(
            described, attn_implementation=attention_of(described), dtype=compute_dtype(settings)
        )
    with torch.no_grad():
        initialise(model, model, partition, seed)
    model.tie_weights()
    return model


def initialise(module: torch.nn.Module, owner: PreTrainedModel, partition: bool, seed: int) -> int:
    """Draws the weights of `module` and all below it as Transformers does, children first (modeling_utils.py
    `initialize_weights`, 5.23); each module from a seed of its own, so that gathered weights are drawn as whole ones
    are. Returns the seed of the next module."""
    if isinstance(module, PreTrainedModel):
        owner = module
    for child in module.children():
        seed = initialise(child, owner, partition, seed)
    # a family may also touch the weights of a module's children
    touched = [p for part in (module, *module.children()) for p in part.parameters(recurse=False)]
    partition = partition and bool(touched)
    with deepspeed.zero.GatheredParameters(touched, modifier_rank=0, enabled=partition):
        if not partition or dist.get_rank() == 0:
            torch.manual_seed(seed)
            owner._init_weights(module)
    return seed + 1


def build_engine(args: argparse.Namespace, config: Json, settings: Json, split: RankSplit) -> Any:
    """The DeepSpeed engine of the model `config` describes, under the ds_config `settings`."""
    groups = tensor_groups(split, settings)
    model = build_model(config, settings, args, split)
    apply_techniques(model, settings, args)
    groups = groups or share_sequences(model, split, settings["train_micro_batch_size_per_gpu"])
    # DeepSpeed casts buffers to the compute precision, and rotary frequencies do not survive bf16.
    exact = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=args.learning_rate, betas=tuple(args.adam_betas), weight_decay=args.weight_decay, fused=True
    )
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=trained, config=settings, mpu=groups
    )
    for name, buffer in engine.module.named_buffers():
        if name in exact:
            buffer.data = exact[name].to(engine.device)
    engine.train()
    return engine


def micro_batch_loss(engine: Any, batch: Batch, split: RankSplit) -> torch.Tensor:
    """Mean cross-entropy of the next token, or the weighted sum of it where a batch says so, and the load-balancing
    loss where the model has one.

    Where sequences are split it is this rank's share of that: those of all its ranks add up to it.
    """
    mine = split.part(batch.inputs.shape[1])
    inputs, targets = batch.inputs[:, mine], batch.targets[:, mine]
    arguments: Json = {"input_ids": inputs}
    if batch.positions is not None:
        # and no mask: Transformers looks for several rows in a sequence only then (masking_utils.py
        # `_preprocess_mask_arguments`, 5.23)
        arguments["position_ids"] = batch.positions
    elif split.sequence > 1:
        arguments["position_ids"] = torch.arange(mine.start, mine.stop, device=inputs.device).expand_as(inputs)
    if batch.mask is not None:
        arguments["attention_mask"] = batch.mask[:, mine]
    reduction = "mean" if batch.weight is None else "sum"
    balance = None
    if getattr(engine.module, "returns_loss", False):
        loss = engine(**arguments, targets=targets)
        if batch.weight is None:
            loss = loss / targets.numel()
    else:
        outputs = engine(**arguments)
        loss = F.cross_entropy(outputs.logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)
        balance = getattr(outputs, "aux_loss", None)
    if batch.weight is not None:
        loss = loss * (batch.weight * split.sequence)  # each rank of a sequence has its own part of that sum
    if balance is not None:
        loss = loss + engine.module.config.router_aux_loss_coef * balance
    return loss / split.sequence
