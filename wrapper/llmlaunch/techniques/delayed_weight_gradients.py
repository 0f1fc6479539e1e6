"""Weight gradients are computed in a pass of their own, after those of the activations."""

from __future__ import annotations

from llmlaunch.documents.keys import section
from llmlaunch.techniques.technique import technique

__all__ = ["DelayedWeightGradients"]


@section
class DelayedWeightGradients:
    """Megatron-LM has it in the schedule that overlaps the communication of experts."""

    delay_weight_gradients: bool = technique(
        "Weight gradients in a pass of their own; absent = searched",
        default=False,
        written=bool | None,
        bit_equal="the same products, later, added up in the same order of micro-batches",
        source="2BP (Rae et al. 2024)",
        saves="nothing: output gradients wait, the peak rises",
        costs="memory, for overlapped communication",
    )
