"""Values that Megatron reads from fake tensors, which have none."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quick_dispatch import bare

__all__ = ["InventedScalars"]

fake_tensor.CONSTANT_NUMEL_LIMIT = 4096  # lists made into tensors (splits of a grouped GEMM) can be read back


META = torch.device("meta")


@bare
class InventedScalars(TorchDispatchMode):
    """A fake tensor has no value; Megatron reads a few. What it wrote as a constant is known; of the rest flags read as
    false and numbers as one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # every second operator
            tensor = args[0]
            return META if tensor.fake_mode.in_kernel_invocation else tensor.fake_device
        if func is torch.ops.aten._local_scalar_dense.default:
            constant = getattr(args[0], "constant", None)
            if constant is not None:
                return constant.item()
            dtype = args[0].dtype
            return False if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        if func.namespace == "c10d" and "coalesced" in func._schema.name:
            return torch._C._distributed_c10d.FakeWork().boxed()
        return func(*args, **(kwargs or {}))
