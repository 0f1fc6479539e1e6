"""Losses of fewer bytes: compiled, fused with the head (Liger), or of a piece of the sequence after the other."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.layers.columns import Size
from llmlaunch.memory.effects import Effect, trains_head
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.tokens import tokens
from llmlaunch.memory.weights import head_matrix
from llmlaunch.timing.effects import TimeEffect
from llmlaunch.timing.products import NATIVE_LOSS_BYTES, Work


class FusedLinearLossEffect(Effect):
    """Liger takes as many tokens at a time as keep the logits near the size of the head's input
    (fused_linear_cross_entropy.py)."""

    def on(self, job: Job) -> bool:
        return job.techniques.loss == "fused_linear" and job.facts.loss.logit_bytes != 0.0

    def logits_share(self, job: Job, rows: RankColumns) -> Size:
        """One chunk, a power of two of tokens."""
        n = tokens(job, rows)
        chunk = np.ceil(n / np.ceil(job.shape.vocab_size / job.shape.hidden_size))
        piece: FloatColumn = np.minimum(2.0 ** np.ceil(np.log2(chunk)) / n, 1.0)
        return piece


class TiledLossEffect(Effect):
    """Logits of one piece of the sequence at a time (MsT, Luo et al. 2024, section 3.3;
    deepspeed/runtime/sequence_parallel/ulysses_sp.py sequence_tiled_compute, 0.19.8)."""

    def on(self, job: Job) -> bool:
        return job.techniques.loss == "tiled"

    def logits_share(self, job: Job, rows: RankColumns) -> Size:
        """One piece."""
        return 1.0 / job.techniques.loss_tiles

    def beside_logits(self, job: Job, rows: RankColumns) -> Size:
        """The gradients that earlier pieces have filled."""
        return earlier_tiles(job, rows)

    def after_the_loss(self, job: Job, rows: RankColumns) -> Mapping[str, FloatColumn]:
        """What the loss reads."""
        return {"logits_and_loss": tiled_inputs(job, rows)}


def earlier_tiles(job: Job, rows: RankColumns) -> Size:
    """Return the gradients of all hidden states and of the head's weight, which pieces of a tiled loss before the last
    have filled (deepspeed/runtime/sequence_parallel/ulysses_sp.py SequenceTiledCompute.backward, 0.19.8; traced)."""
    if job.facts.loss.fused_loss is not None:
        return 0.0
    hidden = job.facts.layer.activation_bytes * tokens(job, rows) * job.shape.hidden_size
    no_temporary = job.facts.layer.weight_gradient_fused or not trains_head(job)
    head = 0.0 if no_temporary else job.facts.states.parameter_bytes * head_matrix(job, rows)
    return np.where(rows.last, hidden + head, 0.0)


def tiled_inputs(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the hidden states that a tiled loss reads, which live as long as the loss, through the backward pass of
    all layers (ulysses_sp.py SequenceTiledCompute.forward, `ctx.kwargs_to_shard`, 0.19.8; traced)."""
    if job.facts.loss.fused_loss is not None:
        return np.zeros(len(rows))
    return np.where(rows.last, job.facts.layer.activation_bytes * tokens(job, rows) * job.shape.hidden_size, 0.0)


class NativeLossTime(TimeEffect):
    """The compiled loss moves fewer bytes."""

    def on(self, job: Job) -> bool:
        """Where it is compiled, or Transformer Engine's, which moves fewer bytes still, and which nobody has
        measured."""
        return job.techniques.loss in ("native", "te")

    def logit_bytes(self, moved: float) -> float:
        """Those of the compiled loss."""
        return NATIVE_LOSS_BYTES


class TiledLossTime(TimeEffect):
    """No logit is kept (Luo et al. 2024, MsT)."""

    def on(self, job: Job) -> bool:
        return job.techniques.loss == "tiled"

    def repeated_head(self, head: Work) -> FloatColumn:
        """The product that makes the logits."""
        return head.forward
