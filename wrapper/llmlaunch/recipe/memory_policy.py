"""When a plan is called safe: the keys under `memory:`."""

from __future__ import annotations

from typing import Literal

from llmlaunch.documents.keys import key, section
from llmlaunch.units import GIB

__all__ = ["IN_USE", "NO_CALIBRATION", "MemoryPolicy"]

FLOOR_GIB = 4.0  # 20 % of a 40 GB card is too thin
IN_USE, NO_CALIBRATION = "in-use", "none"


@section
class MemoryPolicy:
    """When a plan is called safe. Without a word here, and with a `risk`, measured runs set the limit of a GPU where
    there are enough of them. With a `limit` alone, and wherever they do not, it is a share of device memory, and at
    least `floor_gib` stay free."""

    limit: float | None = key(
        "Share of device memory that may be used (Fujii's rule is 0.8), in place of measured runs",
        default=None,
        gt=0,
        le=1,
    )
    floor_gib: float | None = key(
        "What must stay free at least, in units of 2**30 bytes (GPUs only); absent = 4.0 beside a share",
        default=None,
        ge=0,
        le=1024,
    )
    risk: float | None = key(
        "Share of runs that may need more than predicted and the margin; absent = 0.07",
        default=None,
        gt=0,
        le=0.5,
    )
    calibration: str = key(
        "What measured runs say of predictions: in-use (for its backend and accelerator), none, or an id",
        default=IN_USE,
        pattern=r"^[A-Za-z0-9.-]+$",
    )
    accept: str | None = key(
        "tight: run also what fits the card only if its prediction is not too low, with a layout to fall back on",
        default=None,
        written=Literal["tight"],
    )

    @property
    def floor_bytes(self) -> int:
        """What stays free beside a share of memory."""
        return int((FLOOR_GIB if self.floor_gib is None else self.floor_gib) * GIB)

    @property
    def by_runs(self) -> bool:
        """Whether measured runs may set the limit."""
        return self.limit is None or self.risk is not None
