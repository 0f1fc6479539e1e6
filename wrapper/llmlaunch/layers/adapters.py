"""Which linear layers have a low-rank adapter beside them."""

from __future__ import annotations

from collections.abc import Sequence

from llmlaunch.layers.matrix import Matrix
from llmlaunch.techniques.requests import FUSED_MODULES, Adapters

__all__ = ["adapted", "fused_adapted", "fused_names"]


def adapted(matrices: Sequence[Matrix], adapters: Adapters) -> list[tuple[Matrix, float]]:
    """Return the linear layers that have an adapter, as Hugging Face's models have them: the matrix of each, and
    the columns of that matrix that are its part."""
    targets = adapters.targets
    return [(matrix, part.columns) for matrix in matrices for part in matrix.parts if part.name in targets]


def fused_adapted(matrices: Sequence[Matrix], adapters: Adapters) -> list[Matrix]:
    """Return the linear layers of Megatron core that have an adapter (megatron/bridge/peft/lora.py LoRA,
    Megatron-Bridge 0.6)."""
    names = fused_names(adapters)
    return [matrix for matrix in matrices if matrix.fused in names]


def fused_names(adapters: Adapters) -> frozenset[str]:
    """Return the linear layers of Megatron core whose parts all have an adapter; not every MLP has a gate."""
    targets = adapters.targets
    return frozenset(name for name, parts in FUSED_MODULES.items() if {*parts} - {"gate_proj"} <= targets)
