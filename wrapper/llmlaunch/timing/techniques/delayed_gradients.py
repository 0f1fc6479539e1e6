"""Weight gradients that come after the exchange of the experts' tokens has begun."""

from __future__ import annotations

from llmlaunch.columns import FloatColumn
from llmlaunch.memory.job import Job
from llmlaunch.timing.layer_parts import LayerParts
from llmlaunch.timing.products import SplitColumns, Work
from llmlaunch.timing.techniques.expert_overlap import ExpertOverlapTime, beside_another_microbatch

__all__ = ["DelayedGradientsTime"]


class DelayedGradientsTime(ExpertOverlapTime):
    """The schedule of overlapped exchanges, in which tokens need not wait for weight gradients
    (`--delay-wgrad-compute`)."""

    def on(self, job: Job) -> bool:
        """Where it is asked for."""
        return job.techniques.delay_weight_gradients

    def waited(
        self, at: SplitColumns, parts: LayerParts, exchange: Work, passes: tuple[FloatColumn, FloatColumn]
    ) -> Work | None:
        """All of the exchange runs beside both passes, in one piece."""
        return beside_another_microbatch(exchange, [passes[0] + passes[1]])
