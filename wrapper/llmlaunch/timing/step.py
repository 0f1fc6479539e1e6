"""Seconds of one training step by what they are spent on, for one layout or for a million."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from llmlaunch.cluster.profile import Cluster
from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.job import Job
from llmlaunch.timing.network import exposed
from llmlaunch.timing.passes import PassSeconds, pass_seconds
from llmlaunch.timing.update import UpdateSeconds, update_seconds

__all__ = ["StepTime", "combined", "step_seconds", "step_time"]


@dataclass(frozen=True)
class StepTime:
    """Columns of seconds: the forward and backward passes, the communication of data parallelism that nothing hides,
    and the optimizer."""

    passes: PassSeconds
    data_parallel: FloatColumn
    optimizer: FloatColumn

    @property
    def total(self) -> FloatColumn:
        return self.passes.total + self.data_parallel + self.optimizer

    @property
    def terms(self) -> Mapping[str, FloatColumn]:
        """`total` by what it is spent on."""
        return {**self.passes.terms, "data_parallel": self.data_parallel, "optimizer": self.optimizer}


def step_time(job: Job, cluster: Cluster, layouts: LayoutColumns, microbatches: IntColumn | None = None) -> StepTime:
    """Return the seconds of one step of every layout. `microbatches` is the number per pipeline and step; None derives
    it from the workload's batch."""
    return combined(pass_seconds(job, cluster, layouts, microbatches), update_seconds(job, cluster, layouts))


def combined(passes: PassSeconds, update: UpdateSeconds) -> StepTime:
    """Join passes and update. Transfers cost what no pass hides, and, while they are hidden, a share of the device.
    Where parameters are gathered for every micro-batch, the backward pass has to hide that and the reduction of the
    gradients."""
    m, each = passes.microbatches, update.gather_each
    times = update.overlapped * passes.hiding_times
    gather, reduce = update.gather_seconds, update.reduce_seconds
    if np.any(update.reduce_each):
        times = np.where(update.reduce_each, 1.0, times)
        reduce = reduce + each * gather
    before = np.where(each, m, 1.0) * exposed(gather, times * passes.hiding_forward)
    after = np.where(update.reduce_each, m, 1.0) * exposed(reduce, times * passes.hiding_backward)
    return StepTime(passes, before + after, update.optimizer_seconds)


def step_seconds(passes: PassSeconds, update: UpdateSeconds) -> FloatColumn:
    """Return the total of `combined`, without its terms."""
    return combined(passes, update).total
