"""A linear layer keeps a sample of its input's rows for the weight gradient."""

from __future__ import annotations

from llmlaunch.documents.keys import section
from llmlaunch.techniques.technique import WHAT_IF, technique

__all__ = ["SampledInputs"]


@section
class SampledInputs:
    """No backend runs it."""

    sampled_share: float = technique(
        "WTA-CRS: share of each linear layer's input rows kept for the weight gradient",
        default=1.0,
        place=WHAT_IF,
        gt=0,
        le=1,
        source="WTA-CRS (Liu et al. 2023)",
        saves="the inputs of linear layers, but the share of their rows",
        costs="noise in the weight gradient",
    )
