"""A loss that is computed of a piece of the sequence after the other."""

from __future__ import annotations

from llmlaunch.columns import FloatColumn
from llmlaunch.memory.job import Job
from llmlaunch.timing.effects import TimeEffect
from llmlaunch.timing.products import Work

__all__ = ["TiledLossTime"]


class TiledLossTime(TimeEffect):
    """No logit is kept (Luo et al. 2024, MsT)."""

    def on(self, job: Job) -> bool:
        """Where the loss is tiled."""
        return job.techniques.loss == "tiled"

    def repeated_head(self, head: Work) -> FloatColumn:
        """The product that makes the logits."""
        return head.forward
