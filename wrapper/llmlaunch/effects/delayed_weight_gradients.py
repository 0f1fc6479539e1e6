"""Weight gradients in a pass of their own (2BP)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.effects.expert_overlap import ExpertOverlapTime, beside_another_microbatch, permuted_tokens
from llmlaunch.layers.columns import LayerColumns
from llmlaunch.layers.mlp import Mlp
from llmlaunch.memory.effects import Effect
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.layer_bytes import layers_of
from llmlaunch.memory.tokens import hidden_bytes
from llmlaunch.timing.effects import LayerParts
from llmlaunch.timing.products import SplitColumns, Work


class DelayedWeightGradientsEffect(Effect):
    """What weight gradients are made of waits for their pass."""

    def on(self, job: Job) -> bool:
        return job.techniques.delay_weight_gradients

    def beside_layer(self, job: Job, rows: RankColumns) -> Mapping[str, FloatColumn]:
        """What waits for the separate pass that computes the weight gradients of a layer's MLP, beyond what its
        backward pass has alive: the gradient of the experts' output, and of a dense MLP the gradients of its linears'
        outputs and their inputs. Attention's come last, when the MLP is gone (2BP, Rae et al. 2024, section 3;
        transformer_engine/pytorch/module/_common.py WeightGradStore, 2.20; model_chunk_schedule_plan.py, core 0.19;
        traced)."""
        layers, hidden = layers_of(job, rows), hidden_bytes(job, rows)
        columns = layers.by_group(layers.of_blocks(Mlp, _weight_gradient_inputs))
        dense = rows.most_of([np.where(size > 0, hidden + size, 0.0) for size in columns])
        return {"delayed_weight_gradients": np.maximum(dense, permuted_tokens(job, rows))}


def _weight_gradient_inputs(mlp: Mlp, c: LayerColumns) -> FloatColumn:
    """Return what a dense MLP's weight gradients are made of that is as wide as the MLP."""
    return c.tokens * _bytes_per_column(c, mlp.gated) * mlp.width / c.tensor


def _bytes_per_column(c: LayerColumns, gated: bool) -> float:
    return c.facts.layer.activation_bytes * (2.0 if gated else 1.0) + c.facts.layer.linear_input_bytes


class DelayedGradientsTime(ExpertOverlapTime):
    """The schedule of overlapped exchanges, in which tokens need not wait for weight gradients
    (`--delay-wgrad-compute`)."""

    def on(self, job: Job) -> bool:
        return job.techniques.delay_weight_gradients

    def waited(
        self, at: SplitColumns, parts: LayerParts, exchange: Work, passes: tuple[FloatColumn, FloatColumn]
    ) -> Work | None:
        """All of the exchange runs beside both passes, in one piece."""
        return beside_another_microbatch(exchange, [passes[0] + passes[1]])
