"""How operators on fake tensors are dispatched: faster than torch does it, and with values for the few that are read.

A trace dispatches some ten thousand operators, most of them hundreds of times with the same shapes. Torch's own cache
of what they give out (torch/_subclasses/fake_tensor.py, 2.13) is kept; only its key is made faster, of the same parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

fake_tensor.CONSTANT_NUMEL_LIMIT = 4096  # lists made into tensors (splits of a grouped GEMM) can be read back

META = torch.device("meta")
PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

FLAGS = (torch.bool, torch.uint8)  # the latter are DeepSpeed's of an overflow

_own_key = FakeTensorMode._cache_key


def bare(mode: type) -> type:
    """A dispatch mode without the guard against torch's compiler, which is not in use, around each call."""
    wrapped = mode.__dict__["__torch_dispatch__"]
    mode.__torch_dispatch__ = getattr(wrapped, "__wrapped__", wrapped)  # type: ignore[attr-defined]
    return mode


class _Unusual(Exception):
    """An argument whose key torch makes itself."""


def _flatten(into: list[Any], values: Any, mode: Any) -> None:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.fake_mode is not mode or value.constant is not None or value.layout is not torch.strided:
                raise _Unusual
            into += (
                kind,
                value.dtype,
                value.shape,
                value.stride(),
                value.fake_device,
                value.storage_offset(),
                value.untyped_storage().nbytes(),
                value.requires_grad,
                value.is_conj(),
                value.is_neg(),
            )
        elif kind in PLAIN:
            into += (kind, value)
        elif kind in (list, tuple):
            into += (kind, len(value))
            _flatten(into, value, mode)
        else:
            raise _Unusual


def _key(mode: Any, state: Any, func: Any, args: Any, kwargs: Any) -> Any:
    key = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
    try:
        _flatten(key, args, mode)
        for name, value in kwargs.items():
            _flatten(key, (name, value), mode)
    except _Unusual:
        return _own_key(mode, state, func, args, kwargs)
    return fake_tensor._DispatchCacheKey(tuple(key))


def install() -> None:
    FakeTensorMode._cache_key = _key
    bare(FakeTensorMode)


@bare
class InventedScalars(TorchDispatchMode):
    """A fake tensor has no value; the frameworks read a few. What it wrote as a constant is known; of the rest flags
    read as false and numbers as one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # every second operator
            tensor = args[0]
            return META if tensor.fake_mode.in_kernel_invocation else tensor.fake_device
        if func is torch.ops.aten._local_scalar_dense.default:
            constant = getattr(args[0], "constant", None)
            if constant is not None:
                return constant.item()
            dtype = args[0].dtype
            if dtype in FLAGS:
                return False
            return 1.0 if dtype.is_floating_point else 1
        if func.namespace == "c10d" and "coalesced" in func._schema.name:
            return torch._C._distributed_c10d.FakeWork().boxed()
        return func(*args, **(kwargs or {}))
