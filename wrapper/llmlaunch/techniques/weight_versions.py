"""PipeDream-2BW (Narayanan et al. 2021): the pipeline never drains, so several versions of weights are in use."""

from __future__ import annotations

from llmlaunch.documents.keys import section
from llmlaunch.techniques.technique import WHAT_IF, technique

__all__ = ["WeightVersions"]


@section
class WeightVersions:
    """No backend runs it."""

    weight_versions: int = technique(
        "Versions of the weights in flight; PipeDream-2BW keeps 2", default=1, place=WHAT_IF, ge=1, le=8
    )
