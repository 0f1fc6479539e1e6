"""Seconds of one training step by what they are spent on, for one layout or for a million."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmlaunch.cluster.profile import Cluster
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.job import Job
from llmlaunch.timing.constants import constant
from llmlaunch.timing.running import Running, running
from llmlaunch.timing.update import Update, update

__all__ = ["StepTime", "combined", "step_seconds", "step_time"]

FloatColumn = NDArray[np.float64]


@dataclass(frozen=True)
class StepTime:
    """Columns of seconds by term; `total` is their sum."""

    terms: Mapping[str, FloatColumn]

    @property
    def total(self) -> FloatColumn:
        total: FloatColumn = sum(self.terms.values())  # type: ignore[assignment]
        return total


def step_time(
    job: Job, cluster: Cluster, layouts: LayoutColumns, microbatches: NDArray[np.int64] | None = None
) -> StepTime:
    """Seconds of one step for every layout. `microbatches` is the number per pipeline and step; None is what the
    workload's batch makes."""
    return combined(running(job, cluster, layouts, microbatches), update(job, cluster, layouts))


def combined(running: Running, update: Update) -> StepTime:
    """Passes and update together."""
    return StepTime({**running.terms, **_update_terms(running, update)})


def step_seconds(running: Running, update: Update) -> FloatColumn:
    """The total of `combined`, of passes that are summed already."""
    seconds = running.total
    for column in _update_terms(running, update).values():
        seconds = seconds + column
    return seconds


def _update_terms(running: Running, update: Update) -> Mapping[str, FloatColumn]:
    """What of the transfers no pass hides, and what they slow down while they are hidden, because they take a share of
    the device."""
    m = running.microbatches
    reduce = np.where(update.reduce_each, m, 1) * _exposed(
        update.reduce_seconds, np.where(update.overlapped, running.hiding_backward, 0.0)
    )
    once = _exposed(update.gather_seconds, np.where(update.overlapped, running.hiding_forward, 0.0))
    again = _exposed(update.gather_seconds, running.hiding_backward)
    gather = np.where(update.gather_each, m * (once + again), once)
    return {"data_parallel": reduce + gather, "optimizer": update.optimizer_seconds}


def _exposed(seconds: FloatColumn, hiding: FloatColumn) -> FloatColumn:
    slowed = constant("overlap_cost") * seconds
    return np.maximum(seconds - (1.0 - constant("overlap_cost")) * hiding, slowed)
