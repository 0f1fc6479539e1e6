"""What a plan says of its whole job: when it is expected to end, and on how many fewer nodes it is faster."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from llmlaunch.frozen import frozen
from llmlaunch.layout import Layout


@frozen
class ExpectedEnd:
    """When the job is expected to end, with its saves, stops that nobody planned and the error of the predicted step
    time; waiting in the queue is not in it. Times are None where the job may never end.

    `step_time_spread` is the relative standard deviation of real step times from predicted ones. It is None where no
    run of such a job was measured, as `step_time_source` says; then nobody knows `p95_seconds` and `within_budget`
    either, and `p50_seconds` holds if steps take as long as predicted.

    `goodput` is the share of the time in which it makes steps that last, `stops` the mean number of stops,
    `save_interval` the steps between two saves that stay, with `save_interval_reason` where the recipe leaves it open,
    `non_persistent_interval` those between two others, `within_budget` the probability to end within `budget.days`."""

    p50_seconds: float | None
    p95_seconds: float | None
    goodput: float
    stops: float | None
    device_hours_between_stops: float
    stops_source: str
    save_interval: int | None
    save_interval_reason: str | None
    save_seconds: float | None
    resume_seconds: float
    step_time_spread: float | None
    step_time_source: str
    within_budget: float | None = None
    non_persistent_interval: int | None = None


@frozen
class FasterOnFewer:
    """Fewer nodes on which a step takes less time, with the safe layout that does. `network_share` is the share of the
    planned step that waits for the network."""

    nodes: int
    step_seconds: float
    layout: Layout
    network_share: float

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "layout": self.layout.as_json()}
