"""The correction of a prediction by measured runs, in its two parts: torch's memory, and what is outside it.

Of a rank that is predicted to reserve R bytes and to hold O outside torch, the corrected prediction is
rint(R (1 + torch_share)) + max(O + rint(outside_bytes), 0). What is allocated grows in the same proportion, so the
worst moment stays the worst, allocated <= reserved <= device, and more layers still never need less.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmlaunch.columns import FloatColumn

__all__ = ["NO_CORRECTION", "Correction"]


@dataclass(frozen=True)
class Correction:
    """`torch_share` of what torch's allocator is predicted to hold is added to it (0.03: 3 % more; above -1), and
    `outside_bytes` to the context and the communicators. Both may be negative. `calibration_id` is that of the
    calibration it comes from."""

    torch_share: float = 0.0
    outside_bytes: float = 0.0
    calibration_id: str | None = None

    def __post_init__(self) -> None:
        if not self.torch_share > -1.0:
            raise ValueError(f"a correction leaves nothing of torch's memory: torch_share {self.torch_share}")

    @property
    def torch_factor(self) -> float:
        """The factor for torch's bytes."""
        return 1.0 + self.torch_share

    def outside(self, context: FloatColumn, communicators: FloatColumn) -> tuple[FloatColumn, FloatColumn]:
        """Return both columns with the outside part. The context takes it; a negative rest goes to the communicators,
        and neither falls below zero."""
        if not self.outside_bytes:
            return context, communicators
        moved = context + round(self.outside_bytes)
        return np.maximum(moved, 0.0), np.maximum(communicators + np.minimum(moved, 0.0), 0.0)


NO_CORRECTION = Correction()
