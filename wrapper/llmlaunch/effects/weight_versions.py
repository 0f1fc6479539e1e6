"""Several versions of the weights in flight (PipeDream-2BW). What-if."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.effects import Column, Effect
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.weights import rank_parameters
from llmlaunch.timing.effects import TimeEffect
from llmlaunch.timing.products import SplitColumns

FP32_BYTES = 4.0


class WeightVersionsEffect(Effect):
    """Each further version is an fp32 clone (PipeDream-2BW, Narayanan et al. 2021, section 3.1; its runtime clones
    master weights: 4 bytes a parameter)."""

    def on(self, job: Job) -> bool:
        return job.techniques.weight_versions > 1

    def lasting_states(self, job: Job, rows: RankColumns) -> Mapping[str, FloatColumn]:
        """The clones."""
        counts = rank_parameters(job, rows)
        return {"weight_versions": FP32_BYTES * (job.techniques.weight_versions - 1) * (counts.dense + counts.expert)}


class WeightVersionsTime(TimeEffect):
    """Two versions let the next batch in before the last one is out: nobody waits (PipeDream-2BW, Narayanan et al.
    2021, section 3.1)."""

    order = 2  # there is no bubble that another technique could shorten
    fills_and_drains = False

    def on(self, job: Job) -> bool:
        return job.techniques.weight_versions > 1

    def bubble(self, at: SplitColumns, bubble: FloatColumn, weight_gradients: Column) -> FloatColumn:
        return 0.0 * bubble

    def hiding_times(self, at: SplitColumns, microbatches: FloatColumn, times: FloatColumn) -> FloatColumn:
        """All: a pipeline reduces the gradients of a batch beside all of the next one (section 3.3: max(computation,
        communication / m))."""
        return np.where(at.pipeline > 1.0, np.maximum(microbatches, times), times)

    def overlaps_update(self, layouts: LayoutColumns) -> bool | BoolColumn:
        """Where there is a pipeline."""
        return np.asarray(layouts.pipeline > 1)
