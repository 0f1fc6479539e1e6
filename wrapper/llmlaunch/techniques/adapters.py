"""Low-rank adapters in place of a trained model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from llmlaunch.documents.keys import key, section
from llmlaunch.techniques.technique import TRAINING, technique

__all__ = ["FUSED_MODULES", "OF_ATTENTION", "Adapters", "TrainedAdapters"]

# fmt: off
TargetModule = Literal[
    "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2",
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
]
# fmt: on
FUSED_MODULES: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""The linear layers of a block as Megatron core has them, each with those that Hugging Face's models have for it."""
OF_ATTENTION = (*FUSED_MODULES["linear_qkv"], *FUSED_MODULES["linear_proj"])


@section
class Adapters:
    """Low-rank adapters beside linear layers of the blocks; the rest of the model is frozen.

    `frozen_down` is LoRA-FA (Zhang et al. 2023): the first matrix of each pair is frozen too, so a linear layer keeps
    the r-wide projection of its input instead of the input.
    """

    rank: int = key("Inner width of each adapter", ge=1, le=2**16)
    frozen_down: bool = key("LoRA-FA: the first matrix of each adapter is frozen too", default=False)
    target_modules: tuple[str, ...] = key(
        "Linear layers that have an adapter, by their names in Hugging Face's models or in Megatron core "
        "([linear_qkv, linear_proj] = attention alone); absent = all",
        default=(),
        written=tuple[TargetModule, ...] | None,
        min_length=1,
    )

    @property
    def targets(self) -> frozenset[str]:
        """The linear layers that have an adapter, by their names in Hugging Face's models."""
        names = self.target_modules or tuple(FUSED_MODULES)
        return frozenset(each for name in names for each in FUSED_MODULES.get(name, (name,)))

    def fused_targets(self, gated_mlp: bool) -> tuple[str, ...] | None:
        """Return the linear layers that have an adapter, by their names in Megatron core; None where of one of these a
        part alone has an adapter."""
        whole = []
        for name, every in FUSED_MODULES.items():
            parts = {part for part in every if gated_mlp or part != "gate_proj"}
            if parts <= self.targets:
                whole.append(name)
            elif parts & self.targets:
                return None
        return tuple(whole)

    def as_json(self) -> dict[str, object]:
        """Return what is written of it: without `target_modules` where all have an adapter."""
        targets = {"target_modules": list(self.target_modules)} if self.target_modules else {}
        return {"rank": self.rank, "frozen_down": self.frozen_down, **targets}


@section
class TrainedAdapters:
    """None trains the model itself."""

    adapters: Adapters | None = technique(
        "Train low-rank adapters (LoRA) instead of the model",
        default=None,
        place=TRAINING,
        mapping=Adapters,
        source="LoRA (Hu et al. 2021); LoRA-FA (Zhang et al. 2023)",
        saves="gradients and states of all but the adapters; LoRA-FA also the inputs of linear layers",
        costs="what can be learned is of low rank",
    )
