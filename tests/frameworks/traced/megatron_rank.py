"""One rank of a large Megatron job, run as real code under fake tensors; prints what it held as JSON.

    python megatron_rank.py --world-size 512 --pipeline-rank 0 -- MEGATRON ARGUMENTS

The arguments are those of `pretrain_gpt.py`, read by Megatron's own parser and `validate_args`; the model, DDP, the
optimizer, the schedules and `train_step` are Megatron's own. `pretrain_gpt.py` itself is not in the published wheel:
its batch and loss are written again here. Run it with the interpreter of `.venv-frameworks/`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import time
import types
import typing
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import fake_cuda
import typing_extensions

typing.override = typing_extensions.override  # Megatron core takes it from typing, where Python 3.12 has it
fake_cuda.install()  # before torch is imported

import balanced_routing  # noqa: E402
import fake_triton  # noqa: E402
import te_extension  # noqa: E402
import torch  # noqa: E402
from live_storages import Birth, LiveStorages  # noqa: E402
from torch._subclasses import fake_tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

STORAGES = LiveStorages()


fake_tensor.CONSTANT_NUMEL_LIMIT = 4096  # lists made into tensors (splits of a grouped GEMM) can be read back


class InventedScalars(TorchDispatchMode):
    """A fake tensor has no value; Megatron reads a few. What it wrote as a constant is known; of the rest flags read as
    false and numbers as one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            constant = getattr(args[0], "constant", None)
            if constant is not None:
                return constant.item()
            dtype = args[0].dtype
            return False if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        if func.namespace == "c10d" and "coalesced" in func._schema.name:
            return torch._C._distributed_c10d.FakeWork().boxed()
        return func(*args, **(kwargs or {}))


# Before Megatron is imported.


def compile_as_one_kernel(function: Any = None, **options: Any) -> Any:
    """In place of `torch.compile`: the function runs eagerly, but only what outlives it counts."""
    if function is None:
        return compile_as_one_kernel

    def fused(*args: Any, **kwargs: Any) -> Any:
        with STORAGES.fused():
            return function(*args, **kwargs)

    fused.__name__ = getattr(function, "__name__", "fused")
    return fused


def _convert(module: torch.nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """`Module._apply`, which would swap fake tensors and refuses where a weak reference watches them."""
    for child in module.children():
        _convert(child, convert)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        converted = convert(parameter.data)
        if (converted.device, converted.dtype) != (parameter.device, parameter.dtype):
            module._parameters[name] = moved = torch.nn.Parameter(converted, parameter.requires_grad)
            moved.__dict__.update(parameter.__dict__ | moved.__dict__)  # Megatron marks its parameters
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = convert(buffer)
    return module


_make_tensor = torch.tensor


def _tensor(data: Any, *args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
    """`torch.tensor`, which reads fake scalars in a list below the dispatcher."""
    if isinstance(data, list):
        data = [item.item() if isinstance(item, torch.Tensor) else item for item in data]
    return _make_tensor(data, *args, **options)


def _patch_torch() -> None:
    torch.nn.Module._apply = _convert
    torch.compile = compile_as_one_kernel
    torch.tensor = _tensor
    resize = torch.UntypedStorage.resize_

    def release_or_resize(storage: torch.UntypedStorage, size: int) -> Any:
        if size == 0:
            STORAGES.release(storage)
        return resize(storage, size)

    torch.UntypedStorage.resize_ = release_or_resize


def _install_apex_kernel() -> None:
    """Apex's fused weight gradient, which accumulates into the gradient buffer and allocates nothing."""
    kernel = types.ModuleType("fused_weight_gradient_mlp_cuda")
    kernel.wgrad_gemm_accum_fp32 = kernel.wgrad_gemm_accum_fp16 = lambda *args: None  # type: ignore[attr-defined]
    sys.modules[kernel.__name__] = kernel


def _gather_objects(into: list[Any], value: Any, group: Any = None) -> None:
    into[:] = [value] * len(into)


def _patch_collectives() -> None:
    import torch.distributed as dist

    dist.all_gather_object = _gather_objects
    dist.broadcast_object_list = lambda *args, **options: None
    dist.barrier = lambda *args, **options: None


# After Megatron is imported.


class _Done:
    def wait(self, *args: Any) -> bool:
        return True


def _point_to_point(**tensors: Any) -> dict[str, _Done]:
    """Nothing is sent: the receive buffers were allocated by the caller."""
    return {
        name.removeprefix("tensor_"): _Done()
        for name, value in tensors.items()
        if name.startswith("tensor_") and value is not None
    }


@contextlib.contextmanager
def _one_generator(tracker: Any, name: str = "") -> Iterator[None]:
    yield


def _share_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Megatron compiles this in C++: the discarded output's storage takes over the recomputed one's memory."""
    kept, source = output.untyped_storage(), recomputed.untyped_storage()
    kept.resize_(source.nbytes())
    kept.shares = source  # type: ignore[attr-defined]  # alive as long as either name is


def _patch_megatron() -> None:
    from megatron.core.pipeline_parallel import p2p_communication, schedules
    from megatron.core.tensor_parallel import random

    p2p_communication._batched_p2p_ops = lambda **tensors: list(_point_to_point(**tensors).values())
    p2p_communication._p2p_ops = _point_to_point
    random.CudaRNGStatesTracker.fork = _one_generator
    random._get_cuda_rng_state = lambda *args, **options: torch.zeros(16, dtype=torch.uint8)
    random._set_cuda_rng_state = lambda *args, **options: None
    random._get_share_storage = lambda: _share_storage
    for name, phase in (("forward_step", "forward"), ("backward_step", "backward")):
        setattr(schedules, name, _in_phase(getattr(schedules, name), phase))


CALLS: Counter[str] = Counter()


def _in_phase(function: Callable[..., Any], phase: str) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        before, STORAGES.phase = STORAGES.phase, phase
        CALLS[phase] += 1
        try:
            return function(*args, **options)
        finally:
            STORAGES.phase = before

    return run


# What pretrain_gpt.py does.


def _batch(args: Any, vp_stage: int | None) -> dict[str, Any]:
    """pretrain_gpt.py get_batch, on tensor rank 0: what the data loader yields, broadcast and cut for context."""
    from megatron.core import mpu
    from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
    from megatron.training.utils import is_first_or_last_pipeline_stage

    names = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(names)
    shape = (args.micro_batch_size, args.seq_length)
    batch = {name: torch.zeros(shape, dtype=torch.int64, device="cuda") for name in names[:4]}
    batch["loss_mask"] = torch.zeros(shape, device="cuda")
    batch["attention_mask"] = None
    if args.create_attention_mask_in_dataloader:
        batch["attention_mask"] = torch.zeros(
            (args.micro_batch_size, 1, args.seq_length, args.seq_length), dtype=torch.bool, device="cuda"
        )
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=0,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())


def _loss(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[Any, ...]:
    """pretrain_gpt.py loss_func."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().clone().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), tokens.view(1)])}


def _forward_step(_: Any, model: Any) -> tuple[Any, Any]:
    """pretrain_gpt.py forward_step."""
    from functools import partial

    from megatron.core.utils import get_attr_wrapped_model
    from megatron.training import get_args

    batch = _batch(get_args(), get_attr_wrapped_model(model, "vp_stage"))
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(_loss, batch["loss_mask"])


def _build_model(pre_process: bool, post_process: bool, vp_stage: int | None = None, **groups: Any) -> Any:
    """gpt_builders.py gpt_builder, by the builder the wheel holds."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import get_args
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    collection = groups.get("pg_collection") or ProcessGroupCollection.use_mpu_process_groups()
    builder = GPTModelBuilder(gpt_config_from_args(get_args()))
    return builder.build_model(collection, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)


# The one rank.


def _initialize(arguments: list[str], world_size: int, pipeline_rank: int) -> Any:
    """Megatron's arguments and process groups, as `initialize_megatron` makes them. Gives Megatron's args."""
    from megatron.core.enums import ModelType  # noqa: F401
    from megatron.training import arguments as megatron_arguments
    from megatron.training import global_vars, initialize
    from megatron.training.vocab_utils import calculate_padded_vocab_size
    from torch.testing._internal.distributed.fake_pg import FakeStore

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
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.utils import get_model_config

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
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.training import training

    config = _configure_schedules(args, model, optimizer)
    data = [iter(())] * len(model) if len(model) > 1 else None
    optimizer.step = _in_phase(optimizer.step, "optimizer step")
    for iteration in range(iterations):
        STORAGES.phase = "between"
        _, skipped, *_ = training.train_step(
            _forward_step, data, model, optimizer, scheduler, config, get_forward_backward_func(), iteration
        )
        if skipped:
            raise RuntimeError("Megatron skipped the optimizer step: the trace would miss the optimizer states")


# Report.


def _tensors_in(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple | set) and id(value) not in seen:
        seen.add(id(value))
        for item in [*value.values()] if isinstance(value, dict) else value:
            yield from _tensors_in(item, seen)


def _optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Main parameters and states of every optimizer in the chain; the model's own parameters are not among them."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for name in ("shard_fp32_from_float16_groups", "fp32_from_float16_groups"):
            yield from _tensors_in(getattr(one, name, []), set())
        if one.optimizer is not None:
            for state in one.optimizer.state.values():
                yield from _tensors_in(state, set())


def _state(model: list[Any], optimizer: Any) -> dict[str, Any]:
    buffers = [buffer for chunk in model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    parameters = [parameter.data for chunk in model for parameter in chunk.parameters()]
    gradients = [buffer.grad_data for buffer in buffers]
    states = list(_optimizer_tensors(optimizer))
    sizes = {
        "parameters": STORAGES.bytes_of(parameters),
        "gradients": STORAGES.bytes_of(gradients),
        "optimizer": STORAGES.bytes_of(states),
    }
    return {
        "parameter_count": sum(parameter.numel() for parameter in parameters),
        "padded_count": sum(buffer.grad_data.numel() for buffer in buffers),
        "optimizer_state_count": sum(tensor.numel() for tensor in states),
        "bytes": {**sizes, "other": STORAGES.now_bytes - sum(sizes.values())},
    }


def _grouped(births: list[Birth]) -> list[dict[str, Any]]:
    """Largest first, births that differ in nothing but time together."""
    groups = Counter(births)
    rows = [
        {
            "bytes": birth.bytes * count,
            "count": count,
            "shape": list(birth.shape),
            "dtype": birth.dtype,
            "phase": birth.phase,
            "operator": birth.operator,
            "site": birth.site,
        }
        for birth, count in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["bytes"])


def trace(arguments: list[str], world_size: int, pipeline_rank: int, iterations: int = 2) -> dict[str, Any]:
    """What the rank held: lasting state, peak and what was alive at the peak (bytes, rounded to 512 as c10 does)."""
    started = time.time()
    _patch_torch()
    _patch_collectives()
    fake_triton.install()
    te_extension.install()
    _install_apex_kernel()
    from megatron.core.enums import ModelType
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.training import training

    _patch_megatron()
    args = _initialize(arguments, world_size, pipeline_rank)
    balanced: Any = contextlib.nullcontext()
    if args.num_experts:
        balanced_routing.install(args.moe_router_topk, args.num_experts)
        balanced = balanced_routing.BalancedSelection(args.moe_router_topk, args.num_experts)
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True), STORAGES, InventedScalars(), balanced:
        STORAGES.phase = "setup"
        model, optimizer, scheduler = training.setup_model_and_optimizer(ModelType.encoder_or_decoder, _build_model)
        _train(args, model, optimizer, scheduler, iterations)
        STORAGES.phase = "end"
        state = _state(model, optimizer)
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
        "lasting": _grouped(lasting),
        "peak_bytes": STORAGES.peak_bytes,
        "peak_phase": STORAGES.peak_phase,
        "peak_by_phase": STORAGES.peak_by_phase,
        "at_peak": _grouped(STORAGES.alive_at_peak()),
        "seconds": round(time.time() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--pipeline-rank", type=int, required=True)
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("megatron", nargs="+", metavar="MEGATRON ARGUMENTS")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(sys.stderr):
        result = trace(options.megatron, options.world_size, options.pipeline_rank, options.iterations)
    json.dump(result, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
