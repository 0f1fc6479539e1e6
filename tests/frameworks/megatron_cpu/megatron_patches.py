"""What of Megatron core 0.19 knows only CUDA, told about the CPU. Apply after Megatron is imported."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.datasets import utils
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.torch_norm import WrappedTorchNorm

__all__ = ["patch_megatron"]

_build_norm = WrappedTorchNorm.__new__


def _norm(cls: Any, config: Any, *args: Any, **options: Any) -> torch.nn.Module:
    """Torch's norms under sequence parallelism: like Apex's (fusions/fused_layer_norm.py), each rank norms its own part
    of the sequence, and the mark makes finalize_model_grads.py sum the gradients over the tensor ranks."""
    plain = copy.copy(config)
    plain.sequence_parallel = False
    norm: torch.nn.Module = _build_norm(cls, plain, *args, **options)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


def _on_the_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """`maybe_move_tensor_to_cpu` leaves a tensor that is there already as it is; all-to-all wants numbers, though."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def patch_megatron() -> None:
    utils.compile_helpers = lambda: None  # the wheel holds them compiled; only a checkout has their Makefile
    random._get_cuda_rng_state = lambda *args, **options: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **options: torch.set_rng_state(state)
    WrappedTorchNorm.__new__ = _norm
    token_dispatcher.maybe_move_tensor_to_cpu = _on_the_host
