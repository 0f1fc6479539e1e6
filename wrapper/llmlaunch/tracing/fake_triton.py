"""Triton without a GPU: kernels are decorated and launched, and do nothing.

A Triton kernel only writes into tensors it is given, so a launch allocates nothing that a trace would miss. This also
spares the real package, a gigabyte.
"""

from __future__ import annotations

import sys
import types
from typing import Any
from unittest.mock import MagicMock

from trace_checks import NotTraceable

VERSION = "3.9.0"


class _Kernel:
    """What `@triton.jit` and `@triton.autotune` make of a function."""

    def __init__(self, function: Any) -> None:
        self.fn = getattr(function, "fn", function)
        self.__name__ = getattr(self.fn, "__name__", "kernel")

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: None

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise NotTraceable(f"the Triton kernel {self.__name__} was called from Python")


def _decorator(*args: Any, **options: Any) -> Any:
    """With or without arguments."""
    if len(args) == 1 and not options and callable(args[0]):
        return _Kernel(args[0])
    return _Kernel


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 0


class _Anything(types.ModuleType):
    """A module any name can be taken from; nothing runs in it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


def install() -> None:
    """Put the stand-in where `import triton` looks, and let torch know that there is no compiler behind it."""
    import torch.utils._triton

    torch.utils._triton.has_triton_package = lambda: False
    triton: Any = _Anything("triton")
    triton.__path__ = []
    triton.__version__ = VERSION
    triton.jit = triton.autotune = triton.heuristics = _decorator
    triton.cdiv, triton.next_power_of_2 = _cdiv, _next_power_of_2
    triton.Config = MagicMock
    sys.modules["triton"] = triton
    for name in ("language", "language.core", "language.standard", "language.extra", "runtime", "runtime.autotuner"):
        parent, _, leaf = f"triton.{name}".rpartition(".")
        module = _Anything(f"triton.{name}")
        module.__path__ = []
        sys.modules[module.__name__] = module
        setattr(sys.modules[parent], leaf, module)
