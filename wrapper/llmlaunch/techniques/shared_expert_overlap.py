"""The shared expert computes while tokens travel to the others."""

from __future__ import annotations

from llmlaunch.documents.keys import section
from llmlaunch.techniques.technique import SHARED_EXPERT, technique

__all__ = ["SharedExpertOverlap"]


@section
class SharedExpertOverlap:
    """It runs on a stream beside the exchange."""

    overlap_shared_expert: bool = technique(
        "megatron-lm: the shared expert computes while tokens travel to the others; absent = searched",
        default=False,
        written=bool | None,
        bit_equal="the same kernels, on a stream beside the others",
        matters=("expert", "expert_tensor"),
        needs=SHARED_EXPERT,
        elsewhere="where no token travels to its experts",
        source="Megatron core, SharedExpertMLP",
        saves="nothing: time that is not estimated",
        costs="the shared expert and the exchange share the device",
    )
