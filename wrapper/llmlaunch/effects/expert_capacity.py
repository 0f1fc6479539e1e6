"""Experts that compute a fixed number of rows."""

from __future__ import annotations

from llmlaunch.memory.job import Job
from llmlaunch.timing.effects import TimeEffect


class ExpertCapacityTime(TimeEffect):
    """The host knows how many rows there are."""

    asks_for_counts = False

    def on(self, job: Job) -> bool:
        return job.techniques.expert_rank_capacity_factor is not None
