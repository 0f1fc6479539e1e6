"""A shared expert that runs while tokens travel to the others."""

from __future__ import annotations

from llmlaunch.columns import FloatColumn
from llmlaunch.memory.job import Job
from llmlaunch.timing.effects import LayerParts, TimeEffect
from llmlaunch.timing.network import exposed
from llmlaunch.timing.products import SplitColumns, Work


class SharedExpertOverlapTime(TimeEffect):
    """The shared expert's first products run while tokens go and its last ones while they come back
    (megatron/core/transformer/moe/shared_experts.py, core 0.19)."""

    order = 2  # another micro-batch's passes hide more

    def on(self, job: Job) -> bool:
        return job.techniques.overlap_shared_expert

    def waited(
        self, at: SplitColumns, parts: LayerParts, exchange: Work, passes: tuple[FloatColumn, FloatColumn]
    ) -> Work | None:
        """What takes longer than the shared expert's products."""
        shared = parts.products_of_every_token(at)
        return Work(exposed(exchange.forward, shared.forward), exposed(exchange.backward, shared.backward))
