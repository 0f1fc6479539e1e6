"""What single operations of Hugging Face models, DeepSpeed and PEFT save for their backward pass, as priced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.frameworks


def saved_storages(run: Callable[[], Any]) -> dict[int, Any]:
    """Return by address the tensors whose storages autograd saves while `run` runs forward; parameters that are saved
    themselves, not as a view of their storage, are left out."""
    import torch

    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            saved[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no other comes to lie at its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    assert output is not None
    return saved


def test_a_plain_linear_holds_the_storage_of_its_weight_and_deepspeeds_own_does_not() -> None:
    """So that without `memory_efficient_linear` every weight that ZeRO 3 gathers lives until its backward pass."""
    import torch
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    weight = torch.nn.Parameter(torch.randn(24, 16))
    tokens = torch.randn(2, 8, 16, requires_grad=True)
    address = weight.untyped_storage().data_ptr()
    assert address in saved_storages(lambda: torch.nn.functional.linear(tokens, weight))
    assert address not in saved_storages(lambda: zero3_linear_wrap(tokens, weight))
