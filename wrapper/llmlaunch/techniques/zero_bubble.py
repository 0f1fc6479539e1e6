"""Weight gradients fill the gaps of the pipeline."""

from __future__ import annotations

from llmlaunch.documents.keys import section
from llmlaunch.techniques.technique import WHAT_IF, technique

__all__ = ["ZeroBubble"]


@section
class ZeroBubble:
    """No backend runs it."""

    zero_bubble: bool = technique(
        "ZB-H1: weight gradients wait for the gaps in which a stage would idle",
        default=False,
        place=WHAT_IF,
        source="ZB-H1 (Qi et al. 2024); 2BP (Rae et al. 2024)",
        saves="of the pipeline's bubble twice the weight gradients of the other stages",
        costs="what weight gradients are made of waits on later stages",
    )
