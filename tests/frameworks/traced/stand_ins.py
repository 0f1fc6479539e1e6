"""What Megatron core takes for granted and this machine has not, answered: to be called before it is imported."""

from __future__ import annotations

import typing
from typing import Any

import typing_extensions

__all__ = ["install"]


def not_compiled(function: Any = None, **options: Any) -> Any:
    return not_compiled if function is None else function


def install() -> None:
    """CUDA, Triton and TransformerEngine's compiled half are pretended, and nothing is compiled."""
    # Megatron core takes it from typing, where Python 3.12 has it
    typing.override = typing_extensions.override  # type: ignore[attr-defined]
    import fake_cuda

    fake_cuda.install()
    import torch

    torch.compile = not_compiled
    import fake_triton
    import te_extension

    fake_triton.install()
    te_extension.install()
