"""What Megatron asks of a CUDA device, answered by the CPU: real tensors, real arithmetic, no device.

Unlike `traced/fake_cuda.py`, whose device holds no values, every tensor asked for on CUDA is made in host memory here.
Install it before Megatron is imported: it binds some of these names.
"""

from __future__ import annotations

import contextlib
import functools
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed
from torch.overrides import TorchFunctionMode

import fake_cuda

_HOST = torch.device("cpu")
_PART_OF_MANY = torch.distributed.distributed_c10d._IllegalWork


def _is_device(value: Any) -> bool:
    return isinstance(value, str | torch.device) and str(value).startswith("cuda")


class _OnTheCpu(TorchFunctionMode):
    """`device="cuda"`, `device=0` and `.to("cuda")` become the CPU; `.cuda()` gives the tensor itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.device:
            return _HOST if _is_device(args[0]) or type(args[0]) is int else func(*args, **kwargs)
        device = kwargs.get("device")
        if _is_device(device) or (isinstance(device, int) and not isinstance(device, bool)):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to:
            args = (args[0], *("cpu" if _is_device(value) or type(value) is int else value for value in args[1:]))
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return str(func(*args)).replace("torch.", "torch.cuda.", 1)  # optimizers sort parameters by it
        return func(*args, **kwargs)


def _not_compiled(function: Any = None, **options: Any) -> Any:
    """Megatron compiles small functions into kernels; on the CPU they run as they are written."""
    return _not_compiled if function is None else function


def _use_the_cpu_generator() -> None:
    """Megatron's generators of the GPU (one for each tensor rank and expert) become states of the CPU's."""
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *args, **options: torch.get_rng_state()
    torch.cuda.set_rng_state = torch.cuda.random.set_rng_state = lambda state, *args: torch.set_rng_state(state)


def _stood_for() -> Any:
    """The device whose checks Megatron is to make: of the compute capability the job was planned for."""
    major = os.environ.get("CPU_STANDS_FOR", "9.0").split(".")[0]
    return types.SimpleNamespace(**{**vars(fake_cuda.HOPPER), "major": int(major)})


def _finish_at_once() -> None:
    """A device does what it is told in order, so that memory given back is not used again before a transfer that reads
    or writes it is over. Gloo's threads know of no order: here a transfer is over when it has been asked for."""
    real = torch.distributed.distributed_c10d._coalescing_manager

    @contextlib.contextmanager
    def coalescing(*args: Any, **options: Any) -> Iterator[Any]:
        with real(*args, **options) as transfers:
            yield transfers
        if getattr(transfers, "works", None):
            transfers.wait()

    torch.distributed.distributed_c10d._coalescing_manager = torch.distributed._coalescing_manager = coalescing
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
        setattr(torch.distributed, name, _waiting(getattr(torch.distributed, name)))


def _waiting(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def done(*args: Any, **options: Any) -> Any:
        work = collective(*args, **options)
        if isinstance(work, torch.distributed.Work) and not isinstance(work, _PART_OF_MANY):
            work.wait()
        return work

    return done


def install() -> None:
    fake_cuda.answer_torch_cuda(torch)
    torch.cuda.get_device_properties = lambda *args: _stood_for()
    torch.autograd.has_torch_function = lambda *args: False  # or a backward pass would run outside the mode
    _use_the_cpu_generator()
    for name in ("memory_reserved", "max_memory_reserved", "device_memory_used"):
        setattr(torch.cuda, name, lambda *args: 0)
    torch.cuda.memory_stats = lambda *args: {}
    torch.cuda.FloatTensor, torch.cuda.IntTensor = torch.FloatTensor, torch.IntTensor
    torch.compile = _not_compiled
    _finish_at_once()
    _OnTheCpu().__enter__()
