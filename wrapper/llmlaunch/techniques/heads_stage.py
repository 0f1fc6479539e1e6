"""The stage of the prediction heads of a pipeline."""

from __future__ import annotations

from typing import Literal

from llmlaunch.documents.keys import section
from llmlaunch.techniques.technique import PREDICTION_HEADS, technique

__all__ = ["HeadsStage"]

LAST = "last"


@section
class HeadsStage:
    """The heads lie on the stage of the loss, or on the one before it."""

    mtp_stage: str = technique(
        "megatron-lm: stage of the prediction heads (model.mtp_num_layers): last = that of the loss; before-last = the "
        "one before it, and the loss has no layers beside it; absent = last",
        default=LAST,
        written=Literal["last", "before-last"] | None,
        needs={"before-last": PREDICTION_HEADS},
        source="Megatron core, pipeline layouts with MTP before the loss",
        saves="prediction heads on a stage of their own or with other layers: the stage of the loss holds neither",
        costs="a longer message to the loss; the heads' activations of two or three micro-batches",
    )

    @property
    def heads_before_loss(self) -> bool:
        """Whether prediction heads lie on a stage before that of the loss."""
        return self.mtp_stage != LAST
