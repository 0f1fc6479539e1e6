"""A loss fused with the head (Liger)."""

from __future__ import annotations

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.layers.columns import Size
from llmlaunch.memory.effects import Effect
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.tokens import tokens

__all__ = ["FusedLinearLossEffect"]


class FusedLinearLossEffect(Effect):
    """Liger takes as many tokens at a time as keep the logits near the size of the head's input
    (fused_linear_cross_entropy.py)."""

    def on(self, job: Job) -> bool:
        """Where the fused loss makes logits."""
        return job.techniques.loss == "fused_linear" and job.facts.loss.logit_bytes != 0.0

    def logits_share(self, job: Job, rows: RankColumns) -> Size:
        """One chunk, a power of two of tokens."""
        n = tokens(job, rows)
        chunk = np.ceil(n / np.ceil(job.shape.vocab_size / job.shape.hidden_size))
        piece: FloatColumn = np.minimum(2.0 ** np.ceil(np.log2(chunk)) / n, 1.0)
        return piece
