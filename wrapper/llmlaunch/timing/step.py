"""Seconds of one training step by what they are spent on, for one layout or for a million."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmlaunch.cluster.profile import Cluster
from llmlaunch.columns import FloatColumn
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.job import Job
from llmlaunch.timing.overlap import exposed
from llmlaunch.timing.running import Running, running
from llmlaunch.timing.update import Update, update

__all__ = ["StepTime", "combined", "step_seconds", "step_time"]


@dataclass(frozen=True)
class StepTime:
    """Columns of seconds: of forward and backward passes, of data parallelism where nothing hides it, of the
    optimizer."""

    passes: Running
    data_parallel: FloatColumn
    optimizer: FloatColumn

    @property
    def total(self) -> FloatColumn:
        return self.passes.total + self.data_parallel + self.optimizer

    @property
    def terms(self) -> Mapping[str, FloatColumn]:
        """`total` by what it is spent on."""
        return {**self.passes.terms, "data_parallel": self.data_parallel, "optimizer": self.optimizer}


def step_time(
    job: Job, cluster: Cluster, layouts: LayoutColumns, microbatches: NDArray[np.int64] | None = None
) -> StepTime:
    """Seconds of one step for every layout. `microbatches` is the number per pipeline and step; None is what the
    workload's batch makes."""
    return combined(running(job, cluster, layouts, microbatches), update(job, cluster, layouts))


def combined(running: Running, update: Update) -> StepTime:
    """Passes and update together: what of the transfers no pass hides, and what they slow down while they are hidden,
    because they take a share of the device. Where parameters are gathered for every micro-batch, the backward pass has
    to hide that and the gradients' way."""
    m, each = running.microbatches, update.gather_each
    times = update.overlapped * running.hiding_times
    gather, reduce = update.gather_seconds, update.reduce_seconds
    if np.any(update.reduce_each):
        times = np.where(update.reduce_each, 1.0, times)
        reduce = reduce + each * gather
    before = np.where(each, m, 1.0) * exposed(gather, times * running.hiding_forward)
    after = np.where(update.reduce_each, m, 1.0) * exposed(reduce, times * running.hiding_backward)
    return StepTime(running, before + after, update.optimizer_seconds)


def step_seconds(running: Running, update: Update) -> FloatColumn:
    """The total of `combined`, without its terms."""
    return combined(running, update).total
