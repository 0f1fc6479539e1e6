"""Gathers and scatters of tensor parallelism hide behind the products."""

from __future__ import annotations

from llmlaunch.documents.keys import section
from llmlaunch.techniques.technique import technique

__all__ = ["TensorOverlap"]


@section
class TensorOverlap:
    """Megatron's `--tp-comm-overlap`."""

    tp_comm_overlap: bool = technique(
        "megatron-lm: gathers and scatters of tensor parallelism run beside the products (user buffers); absent = "
        "searched",
        default=False,
        written=bool | None,
        rounding="the sums over tensor ranks are made piece by piece",
        matters=("tensor",),
        source="Transformer Engine, user buffers",
        saves="nothing: gathers and scatters hide behind the products",
        costs="buffers of ten layer inputs, three workspaces more",
    )
