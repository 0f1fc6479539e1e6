"""The exchange of one micro-batch hides behind the products of another one."""

from __future__ import annotations

from llmlaunch.documents.keys import section
from llmlaunch.techniques.technique import technique

__all__ = ["ExpertOverlap"]


@section
class ExpertOverlap:
    """Megatron's `--overlap-moe-expert-parallel-comm`."""

    overlap_expert_communication: bool = technique(
        "megatron-lm: tokens of one micro-batch travel to experts while another one computes; absent = searched",
        default=False,
        written=bool | None,
        bit_equal="the passes of two micro-batches take turns, gradients are added up in their order",
        source="DeepSeek-V3 (2024), DualPipe",
        saves="nothing: the exchange hides behind another micro-batch",
        costs="what about one more layer keeps; the exchange takes a share of the device; no full recompute",
    )
