"""An MLP computes pieces of the sequence one after the other."""

from __future__ import annotations

from llmlaunch.documents.keys import section
from llmlaunch.techniques.technique import technique

__all__ = ["MlpChunks"]


@section
class MlpChunks:
    """One piece is the whole sequence."""

    mlp_chunks: int = technique(
        "Pieces of the sequence the MLP computes one after the other; absent = searched",
        default=1,
        written=int | None,
        ge=1,
        le=2**20,
        rounding="an MLP's weight gradient is a sum over the chunks",
        source="MsT (Luo et al. 2024), MLP",
        saves="an MLP's temporaries but one piece's; in DeepSpeed also all it saves but its input",
        costs="smaller matrices; in DeepSpeed the MLP's forward pass once more",
    )
