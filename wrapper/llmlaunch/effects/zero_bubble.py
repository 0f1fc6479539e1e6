"""Weight gradients that wait for the gaps in which a pipeline stage would idle (ZB-H1). What-if."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.layers.block import Tensors
from llmlaunch.layers.columns import LayerColumns, Size
from llmlaunch.layers.layer import Layer
from llmlaunch.layers.matrix import INPUTS, OUTPUTS
from llmlaunch.layers.mixture import Mixture
from llmlaunch.memory.effects import Column, Effect
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.layer_bytes import layers_of
from llmlaunch.timing.effects import TimeEffect
from llmlaunch.timing.products import SplitColumns


class ZeroBubbleEffect(Effect):
    """Weight gradients of a micro-batch wait, and what they are made of with them."""

    def on(self, job: Job) -> bool:
        return job.techniques.zero_bubble

    def inner_ranks_hold_most(self, job: Job) -> bool:
        """Later ranks keep more weight gradients waiting, and earlier ones more activations."""
        return True

    def in_passes(self, job: Job, rows: RankColumns) -> Mapping[str, FloatColumn]:
        """What weight gradients are made of, for micro-batches whose own wait: on rank r of r micro-batches, so that no
        rank holds more of them than the first one keeps whole (ZB-H1, Qi et al. 2024, section 2.3): the inputs of all
        linear layers and the gradients of their outputs."""
        layers = layers_of(job, rows)

        def of_layer(layer: Layer, tensors: Tensors) -> Size:
            return _inputs_and_gradients(layer, layers.columns)

        waiting = np.where(rows.layouts.virtual_pipeline > 1, 0, np.minimum(rows.rank, rows.microbatches))
        return {"waiting_weight_passes": np.asarray(waiting * rows.sum_of(layers.by_group(layers.each(of_layer))))}


def _inputs_and_gradients(layer: Layer, c: LayerColumns) -> FloatColumn:
    """Return the inputs of all linears of one layer and the gradients of their outputs. Those as wide as the residual
    stream are split as it is."""
    e, w, total = c.facts.layer.activation_bytes, c.facts.layer.linear_input_bytes, c.zeros()
    for block in layer.blocks:
        routed = block.routed_tokens(c) if isinstance(block, Mixture) else c.zeros()
        for matrix in block.matrices:
            inputs, outputs = w * matrix.inputs_on_device(c), e * matrix.outputs_on_device(c)
            if matrix.of_experts:
                total = total + routed * (inputs + outputs)
            elif matrix.linear:
                inputs = c.tokens * inputs if matrix.divided == INPUTS else c.stream_tokens * inputs
                outputs = c.tokens * outputs if matrix.divided == OUTPUTS else c.stream_tokens * outputs
                total = total + inputs + outputs
    return total


class ZeroBubbleTime(TimeEffect):
    """With weight gradients apart, gradients of inputs are handed on before them, so a stage waits for those of the
    others no longer, and computes as many of its own meanwhile: ZB-H1's (p - 1)(F + B - W) in place of (p - 1)(F + B +
    W) (Qi et al. 2024, section 2.1). It has no chunks."""

    fills_and_drains = False

    def on(self, job: Job) -> bool:
        return job.techniques.zero_bubble

    def bubble(self, at: SplitColumns, bubble: FloatColumn, weight_gradients: Column) -> FloatColumn:
        """Twice the weight gradients of the other stages less."""
        return np.where(at.chunks > 1.0, bubble, np.maximum(bubble - 2.0 * weight_gradients(), 0.0))
