"""Several versions of the weights in flight (PipeDream-2BW). What-if."""

from __future__ import annotations

from collections.abc import Mapping

from llmlaunch.columns import FloatColumn
from llmlaunch.memory.effects import Effect
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.weights import rank_parameters

__all__ = ["WeightVersionsEffect"]

FP32_BYTES = 4.0


class WeightVersionsEffect(Effect):
    """Each further version is an fp32 clone (PipeDream-2BW, Narayanan et al. 2021, section 3.1; its runtime clones
    master weights: 4 bytes a parameter)."""

    def on(self, job: Job) -> bool:
        """Where there is more than one."""
        return job.techniques.weight_versions > 1

    def lasting_states(self, job: Job, rows: RankColumns) -> Mapping[str, FloatColumn]:
        """The clones."""
        counts = rank_parameters(job, rows)
        return {"weight_versions": FP32_BYTES * (job.techniques.weight_versions - 1) * (counts.dense + counts.expert)}
