"""A pipeline that never drains keeps several versions of the weights."""

from __future__ import annotations

from llmlaunch.documents.keys import section
from llmlaunch.techniques.technique import WHAT_IF, technique

__all__ = ["WeightVersions"]


@section
class WeightVersions:
    """No backend runs it."""

    weight_versions: int = technique(
        "Versions of the weights in flight; PipeDream-2BW keeps 2",
        default=1,
        place=WHAT_IF,
        ge=1,
        le=8,
        source="PipeDream-2BW (Narayanan et al. 2021)",
        saves="the pipeline's bubble, and the wait for gradients of data parallelism, which travel beside the next "
        "batch",
        costs="4 bytes a parameter for each version more; gradients of weights a step old",
    )
