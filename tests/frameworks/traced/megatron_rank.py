"""One pipeline rank of a large Megatron job, run as real code under fake tensors.

The arguments are those of `pretrain_gpt.py`, read by Megatron's own parser and `validate_args`; the model, DDP, the
optimizer, the schedules and `train_step` are Megatron's own. Importing this module imports them, patched: it must be
the first to import torch. One process traces one rank.
"""

# ruff: noqa: E402 (the order of imports and patches is the point)
from __future__ import annotations

import contextlib
import os
import sys
import time
import typing
from typing import Any

import fake_cuda
import typing_extensions

typing.override = typing_extensions.override  # Megatron core takes it from typing, where Python 3.12 has it
fake_cuda.install()

import patches

patches.patch_torch()

import fake_triton
import te_extension

fake_triton.install()
te_extension.install()
patches.install_apex_kernel()

import balanced_routing
import torch
from invented_scalars import InventedScalars
from live_storages import STORAGES
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from megatron.training import arguments as megatron_arguments
from megatron.training import global_vars, initialize, training
from megatron.training.vocab_utils import calculate_padded_vocab_size
from patches import CALLS, in_phase
from pretrain import build_model, forward_step
from report import grouped, state_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

patches.patch_megatron()

__all__ = ["trace"]


def _initialize(arguments: list[str], world_size: int, pipeline_rank: int) -> Any:
    """Megatron's arguments and process groups, as `initialize_megatron` makes them. Gives Megatron's args."""

    os.environ.update(RANK="0", WORLD_SIZE=str(world_size), LOCAL_RANK="0", CUDA_DEVICE_MAX_CONNECTIONS="1")
    sys.argv = ["pretrain_gpt.py", *arguments, "--disable-gloo-process-groups"]
    args = megatron_arguments.parse_args()
    args.rank = pipeline_rank * (world_size // args.pipeline_model_parallel_size)  # the pipeline is the outermost order
    megatron_arguments.validate_args(args, {})
    args.padded_vocab_size = calculate_padded_vocab_size(
        args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
    )
    global_vars.set_global_variables(args, build_tokenizer=False)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=args.rank, world_size=world_size)
    initialize._initialize_distributed(None, None, None)
    initialize._set_random_seed(args.seed)
    return args


def _configure_schedules(args: Any, model: list[Any], optimizer: Any) -> Any:
    """The lines of training.py train() between the timers and the first iteration."""

    def one_or_all(functions: list[Any]) -> Any:
        return functions[0] if len(functions) == 1 else functions

    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    if args.overlap_grad_reduce:
        config.no_sync_func = one_or_all([chunk.no_sync for chunk in model])
        if args.align_grad_reduce:
            config.grad_sync_func = one_or_all([chunk.start_grad_sync for chunk in model])
    if args.overlap_param_gather and args.align_param_gather:
        config.param_sync_func = one_or_all([chunk.start_param_sync for chunk in model])
    config.finalize_model_grads_func = finalize_model_grads
    for chunk in model:
        chunk.train()
    return config


def _train(args: Any, model: list[Any], optimizer: Any, scheduler: Any, iterations: int) -> None:
    config = _configure_schedules(args, model, optimizer)
    data = [None] * len(model) if len(model) > 1 else None  # forward_step makes zeros
    optimizer.step = in_phase(optimizer.step, "optimizer step")
    for iteration in range(iterations):
        STORAGES.phase = "between"
        _, skipped, *_ = training.train_step(
            forward_step, data, model, optimizer, scheduler, config, get_forward_backward_func(), iteration
        )
        if skipped:
            raise RuntimeError("Megatron skipped the optimizer step: the trace would miss the optimizer states")


def trace(arguments: list[str], world_size: int, pipeline_rank: int, iterations: int = 2) -> dict[str, Any]:
    """What the rank held: lasting state, peak and what was alive at the peak (bytes, rounded to 512 as c10 does)."""
    started = time.time()
    args = _initialize(arguments, world_size, pipeline_rank)
    balanced: Any = contextlib.nullcontext()
    if args.num_experts:
        balanced_routing.install(args.moe_router_topk, args.num_experts)
        balanced = balanced_routing.BalancedSelection(args.moe_router_topk, args.num_experts)
    with FakeTensorMode(allow_non_fake_inputs=True), STORAGES, InventedScalars(), balanced:
        STORAGES.phase = "setup"
        model, optimizer, scheduler = training.setup_model_and_optimizer(ModelType.encoder_or_decoder, build_model)
        _train(args, model, optimizer, scheduler, iterations)
        STORAGES.phase = "end"
        state = state_of(model, optimizer)
        lasting = STORAGES.alive()
    return {
        "parallel": {
            name: getattr(args, f"{name}_model_parallel_size", None) for name in ("tensor", "pipeline", "expert")
        }
        | {"data": args.data_parallel_size, "context": args.context_parallel_size},
        "pipeline_rank": pipeline_rank,
        "microbatches": get_num_microbatches(),
        "calls": dict(CALLS),
        "iterations": iterations,
        "chunks": len(model),
        "state": state,
        "lasting_bytes": STORAGES.now_bytes,
        "lasting": grouped(lasting),
        "peak_bytes": STORAGES.peak_bytes,
        "peak_phase": STORAGES.peak_phase,
        "peak_by_phase": STORAGES.peak_by_phase,
        "at_peak": grouped(STORAGES.alive_at_peak()),
        "seconds": round(time.time() - started, 1),
    }
