"""What a person watches of a run: plain values, from whoever reads the files, for whoever draws them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Gauge", "Watched"]


@dataclass(frozen=True)
class Gauge:
    """The memory of one GPU, or, where the peak is resident memory, of one rank. None: nobody has said so.

    `used_bytes` is of the moment `seen_at` (unix seconds), above what the device held before the training;
    `peak_bytes` of the rank as `collect` will take it. `predicted_bytes` and `limit_bytes` are those of the layout
    that runs. `note` says what is wrong with the device.
    """

    node: str
    device: str
    uuid: str | None
    ranks: tuple[int, ...]
    pipeline_rank: int | None
    used_bytes: int | None
    peak_bytes: int | None
    predicted_bytes: int | None
    limit_bytes: int | None
    total_bytes: int | None
    seen_at: float
    note: str = ""

    @property
    def share(self) -> float | None:
        """Of its prediction that the peak has reached."""
        if self.peak_bytes is None or not self.predicted_bytes:
            return None
        return self.peak_bytes / self.predicted_bytes

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "ranks": list(self.ranks), "note": self.note or None}


@dataclass(frozen=True)
class Watched:
    """One run at one moment. Times are unix seconds; `losses` the last logged, oldest first; `remarks` sentences about
    what cannot be seen, or is wrong."""

    name: str
    job: str
    phase: str
    because: str = ""
    ended: bool = False
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    loss_since: int | None = None
    """The step at which the loss became NaN or infinite; None while it is a number."""
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    devices: int | None = None
    step_at: float | None = None
    losses: tuple[float, ...] = ()
    peak_kind: str = "device"
    gauges: tuple[Gauge, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def seconds_left(self) -> float | None:
        if self.step is None or self.steps is None or self.step_seconds is None or self.ended:
            return None
        return max(0, self.steps - self.step) * self.step_seconds

    @property
    def fullest(self) -> Gauge | None:
        """The one nearest to its prediction, or above it; the largest where nothing was predicted."""
        known = [gauge for gauge in self.gauges if gauge.peak_bytes is not None]
        return max(known, key=lambda gauge: (gauge.share or 0.0, gauge.peak_bytes or 0), default=None)

    @property
    def memory_ages(self) -> tuple[float, float] | None:
        """When the newest and the oldest of the gauges' numbers were seen."""
        seen = [gauge.seen_at for gauge in self.gauges]
        return (max(seen), min(seen)) if seen else None
