"""Rows for the tokens of a device's experts, as many as are fixed beforehand."""

from __future__ import annotations

from llmlaunch.documents.keys import section
from llmlaunch.techniques.technique import EXPERTS, technique

__all__ = ["ExpertCapacity"]


@section
class ExpertCapacity:
    """None has as many rows as tokens arrive."""

    expert_rank_capacity_factor: float | None = technique(
        "megatron-lm with flex_backend: hybridep: rows for the tokens of a device's experts, as a multiple of an equal "
        "share; a step with more tokens is run again without; absent = as many rows as tokens arrive",
        default=None,
        ge=1,
        le=1000,
        needs=EXPERTS,
        source="Megatron core, HybridEP; Transformer Engine, GroupedMLP",
        saves="nothing: rows that no token fills are kept, too; experts are one kernel, and the host asks for no sizes",
        costs="memory of all rows; a step with more tokens than rows is run again",
    )
