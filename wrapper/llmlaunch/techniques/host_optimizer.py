"""Optimizer states rest on the host, and are updated there."""

from __future__ import annotations

from llmlaunch.documents.keys import section
from llmlaunch.techniques.technique import TechniqueHabit, technique

__all__ = ["HostOptimizer"]


@section
class HostOptimizer:
    """DeepSpeed's CPU Adam, Megatron's hybrid optimizer."""

    offload_optimizer: float = technique(
        "Share of the optimizer states held and updated on the host; absent = searched",
        default=0.0,
        ge=0,
        le=1,
        rounding="Adam on the host's cores rounds otherwise than the fused one on the device",
        habit=TechniqueHabit(
            "optimizer on the host",
            0.10,
            "host memory and its link are shared with data loading and checkpoints, and differ from node to node",
        ),
        on_host="optimizer",
        source="ZeRO-Offload (Ren et al. 2021); M6-10T (Lin et al. 2021)",
        saves="the share of master weights and moments",
        costs="host memory, a slower step",
    )

    @property
    def steps_on_the_host(self) -> bool:
        """Whether CPU cores take part in the optimizer step."""
        return self.offload_optimizer > 0
