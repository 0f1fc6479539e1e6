"""MLPs that compute pieces of the sequence one after the other."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.layers.block import MLP_SHARE
from llmlaunch.layers.columns import LayerColumns
from llmlaunch.layout import RECOMPUTE_FULL
from llmlaunch.memory.effects import Effect
from llmlaunch.memory.job import Job
from llmlaunch.timing.effects import LayerParts, Repeated, TimeEffect
from llmlaunch.timing.products import DevicePace, SplitColumns


class MlpChunksEffect(Effect):
    """What is as wide as an MLP exists of one piece at a time (MsT, Luo et al. 2024, section 3.2)."""

    def on(self, job: Job) -> bool:
        return job.techniques.mlp_chunks > 1

    def columns(self, c: LayerColumns) -> LayerColumns:
        """An MLP keeps its input alone where the framework computes a piece again in the backward pass
        (deepspeed/runtime/sequence_parallel/ulysses_sp.py TiledMLP, 0.19.8)."""
        return replace(c, mlp_pieces=float(c.techniques.mlp_chunks), pieces_again=c.facts.layer.mlp_chunks_recomputed)


class ChunkedMlpTime(TimeEffect):
    """An MLP in pieces is computed again before its backward pass where it keeps its input alone (Luo et al. 2024,
    MsT). What its kernels read and launch more often is the block's (`matrix_reads`)."""

    def on(self, job: Job) -> bool:
        return job.techniques.mlp_chunks > 1 and job.facts.layer.mlp_chunks_recomputed

    def repeated(self, job: Job, at: SplitColumns, pace: DevicePace, parts: LayerParts) -> Repeated | None:
        """The MLPs of a layer without a mixture; full recompute repeats them with the rest."""
        if parts.mlp.mixture is not None:
            return None
        not_full = at.layouts.recompute != RECOMPUTE_FULL
        seconds = not_full * (parts.products_of_every_token(at).forward + parts.activation)
        return Repeated(seconds, MLP_SHARE * parts.mlp.kernels[0] * not_full)
