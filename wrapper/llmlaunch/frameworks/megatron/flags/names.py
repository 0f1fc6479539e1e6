"""Names of a namespace that hold what several flags say together (namespace.py)."""

from __future__ import annotations

__all__ = ["HEADS", "PATTERN", "STAGES"]

STAGES = "layers_by_stage"  # all notations of uneven stages
HEADS = "mtp_stage"  # what one of these notations says of prediction heads
PATTERN = "hybrid_layer_pattern"  # all layers of a hybrid, without the stages
