"""MLPs that compute pieces of the sequence one after the other."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.layers.columns import LayerColumns
from llmlaunch.memory.effects import Effect
from llmlaunch.memory.job import Job

__all__ = ["MlpChunksEffect"]


class MlpChunksEffect(Effect):
    """What is as wide as an MLP exists of one piece at a time (MsT, Luo et al. 2024, section 3.2)."""

    def on(self, job: Job) -> bool:
        """Where there are several."""
        return job.techniques.mlp_chunks > 1

    def columns(self, c: LayerColumns) -> LayerColumns:
        """An MLP keeps its input alone where the framework computes a piece again in the backward pass
        (deepspeed/runtime/sequence_parallel/ulysses_sp.py TiledMLP, 0.19.8)."""
        return replace(c, mlp_pieces=float(c.techniques.mlp_chunks), pieces_again=c.facts.layer.mlp_chunks_recomputed)
