"""Activations of experts that are copied to pages, and back before they are read."""

from __future__ import annotations

from collections.abc import Sequence

from llmlaunch.columns import FloatColumn
from llmlaunch.layers.columns import Size
from llmlaunch.layers.mlp import projected_bytes
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.techniques.paged_stash import equal_share
from llmlaunch.timing.effects import TimeEffect
from llmlaunch.timing.layer_parts import LayerParts
from llmlaunch.timing.network import exposed
from llmlaunch.timing.products import DevicePace, SplitColumns, Work

__all__ = ["PagedStashTime"]


class PagedStashTime(TimeEffect):
    """The copies run on a stream of their own (megatron/core/transformer/moe/paged_stash.py, core 0.19)."""

    order = 4  # beside what else leaves

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

    def moves(self, job: Job, layouts: LayoutColumns) -> bool:
        """Where the device's pages cannot take all."""
        return _spilled_share(job) > 0

    def moved(self, job: Job, rows: RankColumns, layers: Size, moved: Sequence[FloatColumn]) -> Sequence[FloatColumn]:
        """What experts save beyond the device's pages."""
        spilled = _spilled_share(job)
        return [some + spilled * share for some, share in zip(moved, equal_share(job, rows), strict=True)]


def _spilled_share(job: Job) -> float:
    """Return what the device's pages cannot take of the activations of experts, where the busiest device's are as many
    as usual, as a multiple of equally shared ones. It goes to pages in host memory, as far as there are any."""
    stash = job.techniques.paged_stash
    assert stash is not None
    return min(max(job.facts.mixture.expert_imbalance - stash.device_factor, 0.0), stash.host_factor)
