"""What is alive because passes share a schedule: the forward pass of one micro-batch runs beside the backward pass of
another, layer by layer, or weight gradients have passes of their own."""

from __future__ import annotations

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn
from llmlaunch.layers.block import Tensors
from llmlaunch.layers.columns import LayerColumns, Size
from llmlaunch.layers.layer import Layer
from llmlaunch.layers.matrix import INPUTS, OUTPUTS
from llmlaunch.layers.mixture import Mixture
from llmlaunch.layers.mlp import Mlp
from llmlaunch.memory.activations import kept_before_experts
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.layer_bytes import layers_of
from llmlaunch.memory.tokens import hidden_bytes, layer_input

__all__ = ["delayed_weight_gradients", "left_over", "paired_layer", "waiting_weight_passes"]

GRADIENTS_LEFT = 4.0  # of a layer's input: what goes to other stages, and comes from them, while two passes run
STREAMS_LEFT = 5.0  # the same while the loss is computed


def paired_layer(job: Job, rows: RankColumns) -> dict[str, FloatColumn]:
    """Return what a layer that runs forward has beside one that runs backward.

    Layer i of one micro-batch runs with layer L - 1 - i of the one before, part by part: attention, norm, router and
    shared expert of the first save their tensors and leave its tokens permuted, before the experts of the other run
    backward; these are gone when the experts of the first run. A pipeline rank has gradients of the stream on their
    way to other stages besides (megatron/core/models/common/model_chunk_schedule_plan.py
    TransformerLayerSchedulePlan.run, core 0.19; traced).
    """
    if not job.techniques.overlaps_experts:
        return {}
    before = rows.most_of(kept_before_experts(job, rows))
    streams = np.where(rows.layouts.pipeline > 1, GRADIENTS_LEFT, 0.0) * layer_input(job, rows)
    return {"paired_layer": np.where(_pairs(job, rows), before + _permuted(job, rows) + streams, 0.0)}


def left_over(job: Job, rows: RankColumns) -> dict[str, FloatColumn]:
    """Return what is left of the backward pass of one micro-batch when the loss of the next is computed: its embedded
    tokens and their gradient without a pipeline, else the gradient of a layer's permuted tokens and of streams
    (the same, TransformerModelChunkSchedulePlan.run; traced)."""
    if not job.techniques.overlaps_experts:
        return {}
    several, stream = rows.layouts.pipeline > 1, layer_input(job, rows)
    left = np.where(several, _permuted(job, rows) + STREAMS_LEFT * stream, 2.0 * stream)
    return {"paired_layer": np.where(_pairs(job, rows), left, 0.0)}


def _pairs(job: Job, rows: RankColumns) -> BoolColumn:
    """Return whether a forward pass is left for the first backward pass to run beside: not where the warm-up takes
    them all (megatron/core/pipeline_parallel/schedules.py get_pp_rank_microbatches, core 0.19)."""
    p, v = rows.layouts.pipeline, rows.layouts.virtual_pipeline
    group = p if job.microbatch_group is None else job.microbatch_group
    warm_up = np.where(v > 1, 2 * (p - rows.rank - 1) + (v - 1) * group + 1, 1)
    return np.asarray(rows.microbatches * v > warm_up)


def _permuted(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes of the routed tokens of one mixture on their way."""
    layers, e = layers_of(job, rows), job.facts.layer.activation_bytes
    routed = layers.of_blocks(Mixture, lambda mixture, c: e * mixture.outer * mixture.routed_tokens(c))
    return rows.most_of(layers.by_group(routed))


def delayed_weight_gradients(job: Job, rows: RankColumns) -> dict[str, FloatColumn]:
    """Return what waits for the separate pass that computes the weight gradients of a layer's MLP, beyond what its
    backward pass has alive: the gradient of the experts' output, and of a dense MLP the gradients of its linears'
    outputs and their inputs. Attention's come last, when the MLP is gone (2BP, Rae et al. 2024, section 3;
    transformer_engine/pytorch/module/_common.py WeightGradStore, 2.20; model_chunk_schedule_plan.py, core 0.19;
    traced)."""
    if not job.techniques.delay_weight_gradients:
        return {}
    layers, hidden = layers_of(job, rows), hidden_bytes(job, rows)
    columns = layers.by_group(layers.of_blocks(Mlp, _weight_gradient_inputs))
    dense = rows.most_of([np.where(size > 0, hidden + size, 0.0) for size in columns])
    return {"delayed_weight_gradients": np.maximum(dense, _permuted(job, rows))}


def _weight_gradient_inputs(mlp: Mlp, c: LayerColumns) -> FloatColumn:
    """Return what a dense MLP's weight gradients are made of that is as wide as the MLP."""
    return c.tokens * _bytes_per_column(c, mlp.gated) * mlp.width / c.tensor


def _bytes_per_column(c: LayerColumns, gated: bool) -> float:
    return c.facts.layer.activation_bytes * (2.0 if gated else 1.0) + c.facts.layer.linear_input_bytes


def waiting_weight_passes(job: Job, rows: RankColumns) -> dict[str, FloatColumn]:
    """Return what weight gradients are made of, for micro-batches whose own wait: on rank r of r micro-batches, so
    that no rank holds more of them than the first one keeps whole (ZB-H1, Qi et al. 2024, section 2.3): the inputs of
    all linear layers and the gradients of their outputs. What-if."""
    if not job.techniques.zero_bubble:
        return {}
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
