"""The kernel of the loss, and tiles of the sequence in which it is computed."""

from __future__ import annotations

from typing import Literal

from llmlaunch.documents.keys import section
from llmlaunch.techniques.technique import technique

__all__ = ["Loss"]


@section
class Loss:
    """None is torch's own loss."""

    loss: str | None = technique(
        "Kernel of the loss: unfused, fused, Transformer Engine's, fused with the head, in tiles; absent = searched",
        default=None,
        written=Literal["none", "native", "te", "fused_linear", "tiled"] | None,
        words={"none": None},
        rounding="another kernel adds the exponentials of a row up",
        source="MsT (Luo et al. 2024), LM head",
        saves="tiled: all logits but one piece's; native saves time alone",
        costs="tiled: one more pass of the head",
    )
    loss_tiles: int = technique(
        "Pieces of the sequence for loss: tiled; absent = 8",
        default=8,
        written=int | None,
        ge=2,
        le=2**20,
        belongs=("loss", "tiled"),
        rounding="the head's weight gradient is a sum over the tiles",
    )
