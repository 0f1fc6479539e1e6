"""What `pretrain_gpt.py` and `pretrain_hybrid.py` do with their builders; they are not in the published wheel
(Megatron-LM, core 0.19)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    get_model_config,
)
from megatron.training import get_args
from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args
from megatron.training.models.gpt import GPTModelBuilder
from megatron.training.models.hybrid import HybridModelBuilder
from megatron.training.utils import is_first_or_last_pipeline_stage

from patches import PASSES

NAMES = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")


def _zeros(args: Any) -> dict[str, Any]:
    """A batch without a data loader, as one yields it."""
    shape = (args.micro_batch_size, args.seq_length)
    batch: dict[str, Any] = {name: torch.zeros(shape, dtype=torch.int64, device="cuda") for name in NAMES[:4]}
    batch["loss_mask"] = torch.zeros(shape, device="cuda")
    if args.create_attention_mask_in_dataloader:
        batch["attention_mask"] = torch.zeros(
            (args.micro_batch_size, 1, args.seq_length, args.seq_length), dtype=torch.bool, device="cuda"
        )
    return batch


def _batch(args: Any, data: Any, model: Any) -> dict[str, Any]:
    """pretrain_gpt.py get_batch: what the data loader of tensor rank 0 yields, broadcast and cut for context."""

    vp_stage, config = get_attr_wrapped_model(model, "vp_stage"), get_model_config(model)
    layout, layers = config.pipeline_model_parallel_layout, config.mtp_num_layers
    with_mtp = mtp_on_this_rank(layout, layers, ignore_virtual=False, vp_stage=vp_stage)
    if not is_first_or_last_pipeline_stage(vp_stage) and not with_mtp:
        return dict.fromkeys(NAMES)
    batch: dict[str, Any] = dict.fromkeys(NAMES)
    if mpu.get_tensor_model_parallel_rank() == 0:
        batch |= _zeros(args) if data is None else next(data)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=with_mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    own: dict[str, Any] = get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
    )
    return own


def _loss(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[Any, ...]:
    """pretrain_gpt.py loss_func."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().clone().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), tokens.view(1)])}


def _watch(output: torch.Tensor, chunk: int) -> None:
    """Count the pass, and the gradient when it comes back."""
    PASSES["forward", chunk] += 1

    def counted(gradient: torch.Tensor) -> None:
        PASSES["backward", chunk] += 1

    output.register_hook(counted)


def forward_step(data: Any, model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    """pretrain_gpt.py forward_step. A plan of the layers' parts takes the place of the output where the schedule runs
    them (`--overlap-moe-expert-parallel-comm`); `patches` counts its passes."""

    batch = _batch(get_args(), data, model)
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    if return_schedule_plan:
        return output, partial(_loss, batch["loss_mask"])
    if output.requires_grad:
        _watch(output, get_attr_wrapped_model(model, "vp_stage") or 0)
    return output, partial(_loss, batch["loss_mask"])


def build_model(pre_process: bool, post_process: bool, vp_stage: int | None = None, **groups: Any) -> Any:
    """gpt_builders.py gpt_builder or hybrid_builders.py hybrid_builder, by the builders the wheel holds."""

    collection = groups.get("pg_collection") or ProcessGroupCollection.use_mpu_process_groups()
    args = get_args()
    if args.hybrid_layer_pattern is None:
        builder: Any = GPTModelBuilder(gpt_config_from_args(args))
    else:
        builder = HybridModelBuilder(hybrid_config_from_args(args))
    return builder.build_model(collection, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
