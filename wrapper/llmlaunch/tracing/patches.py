"""What of torch and Megatron needs a device, a value or another process, answered without."""

from __future__ import annotations

import contextlib
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed

from live_storages import STORAGES


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
            _hold_instead(module, parameter, moved)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = convert(buffer)
    return module


def _hold_instead(module: torch.nn.Module, parameter: Any, moved: Any) -> None:
    """A Mamba-2 mixer's parameters are used through an object beside it (core/ssm/mamba_context_parallel.py)."""
    holder = vars(module).get("cp")
    for name, value in list(vars(holder).items()) if holder is not None else ():
        if value is parameter:
            setattr(holder, name, moved)


_make_tensor = torch.tensor


def _tensor(data: Any, *args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
    """`torch.tensor`, which reads fake scalars in a list below the dispatcher."""
    if isinstance(data, list):
        data = [item.item() if isinstance(item, torch.Tensor) else item for item in data]
    return _make_tensor(data, *args, **options)


def patch_torch() -> None:
    """Before TransformerEngine and Megatron are imported: they bind some of these names."""
    torch.nn.Module._apply = _convert
    torch.compile = compile_as_one_kernel
    torch.tensor = _tensor
    resize = torch.UntypedStorage.resize_

    def release_or_resize(storage: torch.UntypedStorage, size: int) -> Any:
        if size == 0:
            STORAGES.release(storage)
        return resize(storage, size)

    torch.UntypedStorage.resize_ = release_or_resize
    _patch_collectives()


def install_apex_kernel() -> None:
    """Apex's fused weight gradient, which accumulates into the gradient buffer and allocates nothing."""
    kernel = types.ModuleType("fused_weight_gradient_mlp_cuda")
    kernel.wgrad_gemm_accum_fp32 = kernel.wgrad_gemm_accum_fp16 = lambda *args: None  # type: ignore[attr-defined]
    sys.modules[kernel.__name__] = kernel


def _gather_objects(into: list[Any], value: Any, group: Any = None) -> None:
    into[:] = [value] * len(into)


def _patch_collectives() -> None:
    dist = torch.distributed
    dist.all_gather_object = _gather_objects
    dist.broadcast_object_list = lambda *args, **options: None
    dist.barrier = lambda *args, **options: None


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


class _MessageShapes:
    """The shapes of messages between stages, which ranks tell each other where prediction heads lie before the stage of
    the loss (P2PCommunicator._communicate_shapes, core 0.19). Only those two exchange a longer one, with the outputs of
    all heads, and only for the last chunk of each: chunks run forward in their order and backward in reverse, a group
    of micro-batches each."""

    def __init__(self) -> None:
        self._messages: Counter[str] = Counter()

    def answer(
        self, communicator: Any, send_next: Any, send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        from megatron.core import parallel_state
        from megatron.training import get_args

        args, chunks = get_args(), communicator.config.virtual_pipeline_model_parallel_size or 1
        later = args.pipeline_model_parallel_size - 1 - parallel_state.get_pipeline_model_parallel_rank()
        split = args.tensor_model_parallel_size if args.sequence_parallel else 1
        length = args.seq_length // args.context_parallel_size // split
        from_loss, to_loss = recv_next and later == 1, recv_prev and later == 0
        forward = self._is_of_last_chunk("forward", to_loss, args, chunks)
        backward = self._is_of_last_chunk("backward", from_loss, args, chunks)
        times = 1 + (args.mtp_num_layers or 0)
        rest = [args.micro_batch_size, args.hidden_size]
        return [length * (times if forward else 1), *rest], [length * (times if backward else 1), *rest]

    def _is_of_last_chunk(self, direction: str, between_the_two: bool, args: Any, chunks: int) -> bool:
        if not between_the_two:
            return False
        group = getattr(args, "microbatch_group_size_per_vp_stage", None) or args.pipeline_model_parallel_size
        turn = self._messages[direction] // group % chunks
        self._messages[direction] += 1
        return bool(turn == (chunks - 1 if direction == "forward" else 0))


@contextlib.contextmanager
def _one_generator(tracker: Any, name: str = "") -> Iterator[None]:
    yield


def _share_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Megatron compiles this in C++: the discarded output's storage takes over the recomputed one's memory."""
    target, source = output.untyped_storage(), recomputed.untyped_storage()
    target.resize_(source.nbytes())
    target.shares = source  # alive as long as either name is
    if hasattr(source, "live_key"):  # an empty one is not counted
        target.live_key = source.live_key  # and counted once


def patch_megatron() -> None:
    """After Megatron is imported."""
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
    from megatron.core.pipeline_parallel import p2p_communication, schedules
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import transformer_block
    from transformer_engine.pytorch import distributed as engine

    p2p_communication._batched_p2p_ops = lambda **tensors: list(_point_to_point(**tensors).values())
    p2p_communication._p2p_ops = _point_to_point
    shapes = _MessageShapes()
    p2p_communication.P2PCommunicator._communicate_shapes = lambda *messages: shapes.answer(*messages)
    random.CudaRNGStatesTracker.fork = _one_generator
    for module in (random, engine):  # the latter recomputes layers in 8 bits
        module._get_cuda_rng_state = lambda *args, **options: torch.zeros(16, dtype=torch.uint8)
        module._set_cuda_rng_state = lambda *args, **options: None
    random._get_share_storage = lambda: _share_storage
    _mark_recomputation(random)
    _mark_inputs(transformer_block.TransformerBlock)
    unscale = MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan
    MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan = _without_overflow(unscale)
    for name, phase in (("forward_step", "forward"), ("backward_step", "backward")):
        setattr(schedules, name, in_phase(getattr(schedules, name), phase))
    _mark_plans()


def _mark_plans() -> None:
    """Passes that share a schedule, layer by layer: each node of a plan has its own phase, and a pass counts once all
    its nodes have run (megatron/core/models/common/model_chunk_schedule_plan.py, core 0.19)."""
    try:
        from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan as Plan
        from megatron.core.pipeline_parallel import combined_1f1b
        from megatron.core.pipeline_parallel.utils import ScheduleNode
    except ImportError:  # an older core
        return
    run, step = Plan.run, combined_1f1b.combined_forward_backward_step

    def counted(forward: Any, backward: Any, *args: Any, **options: Any) -> Any:
        output = run(forward, backward, *args, **options)
        for direction, plan in (("forward", forward), ("backward", backward)):
            if plan is not None:
                CALLS[direction] += 1
                PASSES[direction, plan.vp_stage or 0] += 1
        return output

    Plan.run = staticmethod(counted)
    # the backward pass of the loss runs outside the nodes
    combined_1f1b.combined_forward_backward_step = _marked(step, "backward")
    ScheduleNode._forward = _marked(ScheduleNode._forward, "forward")
    ScheduleNode._backward = _marked(ScheduleNode._backward, "backward")


def _mark_recomputation(random: Any) -> None:
    """What both kinds of checkpoints run again in the backward pass has a phase of its own."""
    forward, checkpoint = random.CheckpointFunction.forward, random.CheckpointWithoutOutput.checkpoint

    def forward_marked(context: Any, function: Callable[..., Any], *rest: Any) -> Any:
        return forward(context, recomputed(function), *rest)

    def checkpoint_marked(self: Any, function: Callable[..., Any], *rest: Any) -> Any:
        return checkpoint(self, recomputed(function), *rest)

    random.CheckpointFunction.forward = staticmethod(forward_marked)
    random.CheckpointWithoutOutput.checkpoint = checkpoint_marked


def _mark_inputs(block: Any) -> None:
    """What enters a chunk's layers, which no layer has made, and what enters the norm behind the last."""
    forward = block.forward

    def mark_norm_input(_: Any, inputs: Any) -> None:
        """Gives nothing: what a hook gives takes the place of the input."""
        STORAGES.mark(inputs[:1], "final_norm_input")

    def marked(self: Any, hidden_states: Any, *args: Any, **options: Any) -> Any:
        inputs = hidden_states if self.pre_process else self.input_tensor
        if isinstance(inputs, torch.Tensor):
            STORAGES.mark([inputs], "layer_input")
        norm = self.final_layernorm
        if norm is None:
            return forward(self, hidden_states, *args, **options)
        with norm.register_forward_pre_hook(mark_norm_input):
            return forward(self, hidden_states, *args, **options)

    block.forward = marked


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward pass that has a phase of its own within the backward pass."""

    def run(*args: Any, **options: Any) -> Any:
        before = STORAGES.phase
        if before == "backward":
            STORAGES.phase = "recompute"
        try:
            return function(*args, **options)
        finally:
            STORAGES.phase = before

    return run


def _without_overflow(unscale: Callable[[Any], Any]) -> Callable[[Any], bool]:
    """Gradients of fp16 are looked through for infinities, and a number that is read from a fake tensor is one."""

    def run(optimizer: Any) -> bool:
        unscale(optimizer)
        return False

    return run


CALLS: Counter[str] = Counter()
PASSES: Counter[tuple[str, int]] = Counter()  # by direction and model chunk


def in_phase(function: Callable[..., Any], phase: str) -> Callable[..., Any]:
    """The function, counted, and what it allocates marked with the phase."""

    marked = _marked(function, phase)

    def run(*args: Any, **options: Any) -> Any:
        CALLS[phase] += 1
        return marked(*args, **options)

    return run


def _marked(function: Callable[..., Any], phase: str) -> Callable[..., Any]:
    """The function; what it allocates is marked with the phase."""

    def run(*args: Any, **options: Any) -> Any:
        before, STORAGES.phase = STORAGES.phase, phase
        try:
            return function(*args, **options)
        finally:
            STORAGES.phase = before

    return run
