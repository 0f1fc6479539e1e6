"""The last layers of a model alone are trained."""

from __future__ import annotations

from llmlaunch.documents.keys import section
from llmlaunch.techniques.technique import TRAINING, technique

__all__ = ["TrainedLayers"]


@section
class TrainedLayers:
    """None trains all layers."""

    trained_layers: int | None = technique(
        "Train only the last so many layers, the final norm and the head; absent = all",
        default=None,
        place=TRAINING,
        ge=1,
        le=10_000,
        source="SHERL (Diao et al. 2024)",
        saves="gradients, states and activations of the first layers",
        costs="the first layers stay as they are",
    )
