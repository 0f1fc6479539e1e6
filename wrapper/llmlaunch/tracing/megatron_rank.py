"""One pipeline rank of a large Megatron job, run as real code under fake tensors.

The arguments are those of `pretrain_gpt.py`, read by Megatron's own parser and `validate_args`; the model, DDP, the
optimizer, the schedules and `train_step` are Megatron's own. Importing this module imports them, patched: it must be
the first to import torch. One process traces one rank.
"""

# ruff: noqa: E402 (the order of imports and patches is the point)
from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import typing_extensions

import fake_cuda

# Megatron core takes it from typing, where Python 3.12 has it
typing.override = typing_extensions.override  # type: ignore[attr-defined]
fake_cuda.install()

import patches

patches.patch_torch()

import fake_triton
import fla_kernels
import mamba_kernels
import sparse_attention_kernels
import te_extension
import torch_kernels

fake_triton.install()
te_extension.install()
sparse_attention_kernels.install()
fla_kernels.install()
mamba_kernels.install()
torch_kernels.install()
patches.install_apex_kernel()

import torch
from megatron.core import num_microbatches_calculator
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from megatron.training import arguments as megatron_arguments
from megatron.training import global_vars, initialize, training
from megatron.training.vocab_utils import calculate_padded_vocab_size
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import balanced_routing
import fake_dispatch
from caching_allocator import replayed
from fake_dispatch import InventedScalars
from few_microbatches import enough_microbatches, full_microbatches
from live_storages import STORAGES, grouped, state_of, stateless_of
from patches import CALLS, PASSES, in_phase
from pretrain import build_model, forward_step
from trace_checks import TraceEvidence, insist_complete, insist_traceable

patches.patch_megatron()
fake_dispatch.install()


ITERATIONS = 2  # the first makes the optimizer states, the second runs beside them
PACKAGES = ("megatron-core", "transformer_engine", "torch")
KIB = 2**10


@dataclass(frozen=True)
class OfBridge:
    """What Megatron-Bridge adds to a job of Megatron core: adapters, by the settings of its LoRA, and rows that are
    packed. Without `adapters` its own package, called `package` where it is installed, is not needed."""

    adapters: Mapping[str, Any] | None = None
    packed: bool = False
    package: str = ""

    def model_builder(self) -> Callable[..., Any]:
        if not self.adapters and not self.packed:
            return build_model
        import bridge_model

        adapted = bridge_model.with_adapters(build_model, self.adapters) if self.adapters else build_model
        return bridge_model.with_packed_rows(adapted) if self.packed else adapted


@dataclass
class _TracedJob:
    """Megatron's arguments, and how many micro-batches of the job's run in each iteration of the trace."""

    args: Any
    microbatches: int
    run: tuple[int, ...]


def _initialize(arguments: list[str], world_size: int, pipeline_rank: int, fewer: bool) -> _TracedJob:
    """Megatron's arguments and process groups, as `initialize_megatron` makes them."""

    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} | dict(os.environ)
    os.environ.update(variables, RANK="0", WORLD_SIZE=str(world_size), LOCAL_RANK="0")
    sys.argv = ["pretrain_gpt.py", *arguments, "--disable-gloo-process-groups"]
    args = megatron_arguments.parse_args()
    insist_traceable(args)
    args.rank = pipeline_rank * (world_size // args.pipeline_model_parallel_size)  # the pipeline is the outermost order
    megatron_arguments.validate_args(args, {})
    args.padded_vocab_size = calculate_padded_vocab_size(
        args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
    )
    global_vars.set_global_variables(args, build_tokenizer=False)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=args.rank, world_size=world_size)
    initialize._initialize_distributed(None, None, None)
    initialize._set_random_seed(args.seed)
    all_of_them = get_num_microbatches()
    run = (full_microbatches(args, pipeline_rank), *[enough_microbatches(args, pipeline_rank)] * (ITERATIONS - 1))
    return _TracedJob(args, all_of_them, tuple(min(count if fewer else all_of_them, all_of_them) for count in run))


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


def _train(
    args: Any, model: list[Any], optimizer: Any, scheduler: Any, iterations: int, run: Sequence[int] | None = None
) -> int:
    """Gives how many of the steps the optimizer skipped. `run` are the micro-batches of each iteration; without it,
    those of the arguments."""
    config = _configure_schedules(args, model, optimizer)
    data = [None] * len(model) if len(model) > 1 else None  # forward_step makes zeros
    skipped = 0

    def step() -> Any:
        nonlocal skipped
        outcome = own_step()
        skipped += not outcome[0]  # what train_step hands back was reduced over ranks there are not
        return outcome

    own_step, optimizer.step = optimizer.step, in_phase(step, "optimizer step")
    for iteration in range(iterations):
        STORAGES.phase = "between"
        if run is not None:
            num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR.num_micro_batches = run[iteration]
        training.train_step(
            forward_step, data, model, optimizer, scheduler, config, get_forward_backward_func(), iteration
        )
    return skipped


def trace_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trace of a job as trace_ranks.py reads it."""
    bridge = OfBridge(job.get("adapters"), bool(job.get("packed")), job.get("package", ""))
    few = not job.get("all_microbatches")
    return trace(job["arguments"], job["world_size"], job["pipeline_rank"], few, bridge)


def trace(
    arguments: list[str], world_size: int, pipeline_rank: int, fewer: bool = True, bridge: OfBridge = OfBridge()
) -> dict[str, Any]:
    """Return the memory the rank used: lasting state, peak and what was alive at the peak (bytes, rounded to 512 as c10
    does).

    `fewer`: run as few micro-batches as show the peak of all of them. Raises IncompleteTrace where not all of a
    training step ran, NotTraceable where the rank cannot be traced, and what Megatron raises where it refuses the job.
    """
    started = time.time()
    job = _initialize(arguments, world_size, pipeline_rank, fewer)
    args = job.args
    balanced: Any = contextlib.nullcontext()
    if args.num_experts:
        balanced_routing.install(args.moe_router_topk, args.num_experts)
        balanced = balanced_routing.BalancedSelection(args.moe_router_topk, args.num_experts)
    with FakeTensorMode(allow_non_fake_inputs=True), STORAGES, InventedScalars(), balanced:
        STORAGES.phase = "setup"
        model, optimizer, scheduler = training.setup_model_and_optimizer(
            ModelType.encoder_or_decoder, bridge.model_builder()
        )
        skipped = _train(args, model, optimizer, scheduler, len(job.run), job.run)
        STORAGES.phase = "end"
        state = state_of(model, optimizer)
        lasting = STORAGES.alive()
    insist_complete(_evidence(job, len(model), skipped, state, stateless_of(optimizer)))
    packages = (*PACKAGES, bridge.package) if bridge.adapters and bridge.package else PACKAGES
    sizes = {name: getattr(args, f"{name}_model_parallel_size", None) for name in ("tensor", "pipeline", "expert")}
    return {
        "parallel": sizes | {"data": args.data_parallel_size, "context": args.context_parallel_size},
        "pipeline_rank": pipeline_rank,
        "microbatches": job.microbatches,
        "microbatches_run": list(job.run),
        "calls": dict(CALLS),
        "iterations": len(job.run),
        "chunks": len(model),
        "state": state,
        "lasting_bytes": STORAGES.now_bytes,
        "lasting": grouped(lasting),
        "peak_bytes": STORAGES.peak_bytes,
        "peak_phase": STORAGES.peak_phase,
        "peak_by_phase": STORAGES.peak_by_phase,
        "at_peak": grouped(STORAGES.alive_at_peak()),
        "allocator": replayed(STORAGES.events()),
        "versions": {package: metadata.version(package) for package in packages},
        "resident_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB,
        "seconds": round(time.time() - started, 1),
    }


def _evidence(job: _TracedJob, chunks: int, skipped: int, state: dict[str, Any], stateless: int) -> TraceEvidence:
    return TraceEvidence(
        microbatches=job.run,
        forwards=[PASSES["forward", chunk] for chunk in range(chunks)],
        backwards=[PASSES["backward", chunk] for chunk in range(chunks)],
        steps=CALLS["optimizer step"],
        skipped=skipped,
        parameter_count=state["parameter_count"],
        optimizer_state_count=state["optimizer_state_count"],
        stateless=stateless,
        peak_phase=STORAGES.peak_phase,
        peak_by_phase=STORAGES.peak_by_phase,
    )
