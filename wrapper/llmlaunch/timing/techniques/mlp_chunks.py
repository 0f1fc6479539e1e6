"""MLPs that compute a piece of the sequence after the other."""

from __future__ import annotations

from llmlaunch.layers.block import MLP_SHARE
from llmlaunch.layout import RECOMPUTE_FULL
from llmlaunch.memory.job import Job
from llmlaunch.timing.effects import TimeEffect
from llmlaunch.timing.layer_parts import LayerParts, Repeated
from llmlaunch.timing.products import DevicePace, SplitColumns

__all__ = ["ChunkedMlpTime"]


class ChunkedMlpTime(TimeEffect):
    """An MLP in pieces is computed again before its backward pass where it keeps its input alone (Luo et al. 2024,
    MsT). What its kernels read and launch more often is the block's (`matrix_reads`)."""

    def on(self, job: Job) -> bool:
        """Where there are pieces that the framework computes again."""
        return job.techniques.mlp_chunks > 1 and job.facts.layer.mlp_chunks_recomputed

    def repeated(self, job: Job, at: SplitColumns, pace: DevicePace, parts: LayerParts) -> Repeated | None:
        """The MLPs of a layer without a mixture; full recompute repeats them with the rest."""
        if parts.mlp.mixture is not None:
            return None
        not_full = at.layouts.recompute != RECOMPUTE_FULL
        seconds = not_full * (parts.products_of_every_token(at).forward + parts.activation)
        return Repeated(seconds, MLP_SHARE * parts.mlp.kernels[0] * not_full)
