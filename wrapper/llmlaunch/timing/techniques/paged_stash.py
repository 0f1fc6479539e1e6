"""Activations of experts that are copied to pages, and back before they are read."""

from __future__ import annotations

from llmlaunch.layers.mlp import projected_bytes
from llmlaunch.memory.job import Job
from llmlaunch.timing.effects import TimeEffect
from llmlaunch.timing.layer_parts import LayerParts
from llmlaunch.timing.network import exposed
from llmlaunch.timing.products import DevicePace, SplitColumns, Work

__all__ = ["PagedStashTime"]


class PagedStashTime(TimeEffect):
    """The copies run on a stream of their own (megatron/core/transformer/moe/paged_stash.py, core 0.19)."""

    def on(self, job: Job) -> bool:
        """Where there are pages."""
        return job.techniques.paged_stash is not None

    def element_wise(self, job: Job, at: SplitColumns, pace: DevicePace, parts: LayerParts) -> Work | None:
        """What is waited for of copies that are read and written each time, beside all of the layer but its experts.
        What pages in host memory take is not counted here."""
        mixture, experts = parts.mlp.mixture, parts.mlp.experts
        if mixture is None or experts is None:
            return None
        width = job.facts.layer.linear_input_bytes * (mixture.outer + mixture.width)
        width += projected_bytes(at.layer, mixture.gated) * mixture.width
        once = (2.0 * width / pace.element_wise) * mixture.busiest_copies(at.layer)
        beside = parts.computed.forward - experts.forward, parts.computed.backward - experts.backward
        return Work(exposed(once, beside[0]), exposed(once, beside[1]))
