"""Puts the tracer's modules where they are found (they lie beside each other in the package, and import one another by
their bare names), and answers what Megatron core takes for granted and this machine has not. The first import of every
program here."""

from __future__ import annotations

import sys
import typing
from pathlib import Path
from typing import Any

import typing_extensions

sys.path.append(str(Path(__file__).resolve().parents[3] / "wrapper" / "llmlaunch" / "tracing"))


def not_compiled(function: Any = None, **options: Any) -> Any:
    return not_compiled if function is None else function


def install() -> None:
    """Pretend CUDA, Triton and TransformerEngine's compiled half, and compile nothing: before Megatron is imported."""
    # Megatron core takes it from typing, where Python 3.12 has it
    typing.override = typing_extensions.override  # type: ignore[attr-defined]
    import fake_cuda

    fake_cuda.install()
    import torch

    torch.compile = not_compiled
    import fake_triton
    import fla_kernels
    import mamba_kernels
    import sparse_attention_kernels
    import te_extension

    fake_triton.install()
    te_extension.install()
    sparse_attention_kernels.install()
    fla_kernels.install()
    mamba_kernels.install()
