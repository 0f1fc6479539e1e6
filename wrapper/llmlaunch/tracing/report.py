"""What a traced rank held, as plain values for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from live_storages import STORAGES, Birth

__all__ = ["grouped", "state_of", "stateless_of"]


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


def stateless_of(optimizer: Any) -> int:
    """Tensors that an optimizer steps and keeps no state of."""
    return sum(
        not one.optimizer.state.get(tensor)
        for one in getattr(optimizer, "chained_optimizers", [optimizer])
        if one.optimizer is not None
        for group in one.optimizer.param_groups
        for tensor in group["params"]
    )


def state_of(model: list[Any], optimizer: Any) -> dict[str, Any]:
    """How much lasts, and marks it as what it is."""
    buffers = [buffer for chunk in model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    parameters = [parameter.data for chunk in model for parameter in chunk.parameters()]
    gradients = [buffer.grad_data for buffer in buffers]
    states = list(_optimizer_tensors(optimizer))
    sizes = {
        "parameters": STORAGES.mark(parameters, "parameters"),
        "gradients": STORAGES.mark(gradients, "gradients"),
        "optimizer": STORAGES.mark(states, "optimizer_states"),
    }
    return {
        "parameter_count": sum(parameter.numel() for parameter in parameters),
        "padded_count": sum(buffer.grad_data.numel() for buffer in buffers),
        "optimizer_state_count": sum(tensor.numel() for tensor in states),
        "bytes": {**sizes, "other": STORAGES.now_bytes - sum(sizes.values())},
    }


def grouped(births: list[Birth]) -> list[dict[str, Any]]:
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
            "module": birth.module,
            "role": birth.role,
            "until": birth.until,
        }
        for birth, count in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["bytes"])
