"""How context parallelism exchanges: keys and values in a ring, or heads by all-to-all."""

from __future__ import annotations

from typing import Literal

from llmlaunch.documents.keys import section
from llmlaunch.techniques.technique import technique

__all__ = ["ContextExchange"]


@section
class ContextExchange:
    """None leaves the choice to the backend."""

    context_comm: str | None = technique(
        "megatron-lm: keys and values travel in a ring, or heads by all-to-all; absent = searched",
        default=None,
        written=Literal["p2p", "a2a"] | None,
        rounding="a ring merges attention over parts of the sequence, an all-to-all computes it whole",
        matters=("context",),
        source="Ring Attention (Liu et al. 2023); DeepSpeed-Ulysses (Jacobs et al. 2023)",
        saves="nothing: a2a spares the steps of the ring",
        costs="a2a: the attention's output twice; heads must divide",
    )
