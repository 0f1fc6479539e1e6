"""What a person watches of a run: plain values, between the readers of files and the views."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from llmlaunch.report.run_text import loss_text
from llmlaunch.report.terminal import filled
from llmlaunch.report.text import one_line
from llmlaunch.units import duration, gib


@dataclass(frozen=True)
class Gauge:
    """The memory of one GPU or, if the peak is resident memory, of one rank. None: not known.

    `used_bytes` was measured at `seen_at` (unix seconds), above what the device held before the training;
    `peak_bytes` is the peak that `collect` will record. `predicted_bytes` and `limit_bytes` belong to the layout
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
        """The peak as a share of its prediction."""
        if self.peak_bytes is None or not self.predicted_bytes:
            return None
        return self.peak_bytes / self.predicted_bytes

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "ranks": list(self.ranks), "note": self.note or None}


@dataclass(frozen=True)
class Event:
    """One line about a run. A `transient` one is replaced by the next: a step, or a line on the way to the first."""

    text: str
    transient: bool = False
    is_step: bool = False


@dataclass(frozen=True)
class WatchedRun:
    """One run at one moment. Times are unix seconds; `losses` are the last logged, oldest first; `remarks` are
    sentences about what is wrong or cannot be measured; `events` are new since the last read."""

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
    typical_step_seconds: float | None = None
    """Median of the last steps; None: `step_seconds`."""
    tokens_per_second: float | None = None
    devices: int | None = None
    step_at: float | None = None
    overdue_seconds: float | None = None
    """How long no step was logged, if that is unusually long."""
    losses: tuple[float, ...] = ()
    peak_kind: str = "device"
    gauges: tuple[Gauge, ...] = ()
    remarks: tuple[str, ...] = ()
    events: tuple[Event, ...] = ()

    @property
    def title(self) -> str:
        return f"{one_line(self.name)} [{self.job}]"

    @property
    def phase_text(self) -> str:
        return self.phase + (f": {one_line(self.because)}" if self.because else "")

    @property
    def seconds_left(self) -> float | None:
        pace = self.typical_step_seconds or self.step_seconds
        if self.step is None or self.steps is None or pace is None or self.ended:
            return None
        return max(0, self.steps - self.step) * pace

    @property
    def fullest(self) -> Gauge | None:
        """The gauge nearest to or furthest above its prediction; without predictions the one with the largest peak."""
        measured = [gauge for gauge in self.gauges if gauge.peak_bytes is not None]
        return max(measured, key=lambda gauge: (gauge.share or 0.0, gauge.peak_bytes or 0), default=None)

    @property
    def memory_times(self) -> tuple[float, float] | None:
        """When the newest and the oldest of the gauges' numbers were measured."""
        times = [gauge.seen_at for gauge in self.gauges]
        return (max(times), min(times)) if times else None


def step_text(run: WatchedRun, with_memory: bool = True) -> str:
    """Return the latest step of a run in one line; what is not known is left out."""
    parts = [f"step {'?' if run.step is None else f'{run.step:,}'}" + (f"/{run.steps:,}" if run.steps else "")]
    if run.loss is not None:
        parts.append(f"loss {loss_text(run.loss, run.loss_since)}")
    if run.step_seconds is not None:
        parts.append(f"{_rounded(run.step_seconds)} s/step")
    if run.tokens_per_second is not None:
        rate, devices = run.tokens_per_second, run.devices or 1
        each = f" ({_rounded(rate / devices)} per device)" if devices > 1 else ""
        parts.append(f"{_rounded(rate)} tokens/s{each}")
    fullest = run.fullest
    if with_memory and fullest is not None and fullest.peak_bytes is not None:
        predicted = f" of {gib(fullest.predicted_bytes)} predicted" if fullest.predicted_bytes else ""
        parts.append(f"{gib(fullest.peak_bytes)} GiB{predicted}")
    if run.seconds_left is not None:
        parts.append(f"{duration(run.seconds_left)} left")
    return " | ".join(parts)


def step_lines(text: str, width: int | None) -> list[str]:
    """Return the text of a step in lines of at most `width` columns, which break between its parts alone."""
    whole = " | ".join(part.replace(" ", "\0") for part in text.split(" | "))
    return [line.replace("\0", " ") for line in filled(whole, width, others="  ")]


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or not math.isfinite(value) else f"{value:.3g}"
