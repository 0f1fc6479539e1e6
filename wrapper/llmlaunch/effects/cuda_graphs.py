"""What CUDA graphs keep for themselves: the pool of what is captured, which nothing else may use, and the graphs.

Transformer Engine captures each layer's parts forward and backward, with a pipeline for every micro-batch of a step, in
the order of the schedule and into one pool (transformer_engine/pytorch/graph.py make_graphed_callables, 2.20;
megatron/core/transformer/cuda_graphs.py TECudaGraphHelper, core 0.19). So what the parts save for their backward passes
is as large as without graphs, and no larger: it comes and goes in the same order. But the pool stays: while the loss,
the parts that are not captured or the optimizer run, nothing of it is free for them, and it has its own temporaries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial, reduce

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.layers.attention import SoftmaxAttention
from llmlaunch.layers.block import Tensors
from llmlaunch.layers.columns import LayerColumns, Size
from llmlaunch.layers.layer import Layer
from llmlaunch.memory.activations import kept_by_layer
from llmlaunch.memory.constants import constant
from llmlaunch.memory.effects import Effect
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.layer_bytes import layers_of
from llmlaunch.memory.priced_layers import sum_without
from llmlaunch.memory.schedule import in_flight
from llmlaunch.memory.tokens import layer_input
from llmlaunch.techniques import Techniques
from llmlaunch.techniques.switches import FULL_ITERATION, WHOLE_LAYER, CudaGraphs
from llmlaunch.timing.effects import Kernels, TimeEffect

TERM = "cuda_graphs"
Moment = Mapping[str, FloatColumn]

# Kernels of a captured part of one layer, (forward, backward), as a profile of Transformer Engine's layers has them.
CAPTURED_KERNELS: Mapping[str, tuple[float, float]] = {
    "attn": (12.0, 24.0),
    "mlp": (8.0, 16.0),
    "moe_router": (10.0, 16.0),
    "moe_preprocess": (8.0, 8.0),
}
# The saved tensors of each part, by the beginnings of their names.
CAPTURED_TENSORS: Mapping[str, tuple[str, ...]] = {
    "attn": ("attn_",),
    "mlp": ("mlp_",),
    "moe_router": ("mlp_norm", "moe_router", "shared_"),
    "moe_preprocess": (),
}


class CudaGraphsEffect(Effect):
    """A pool for what is captured, and the graphs."""

    decides_moments = (CudaGraphs,)

    def on(self, job: Job) -> bool:
        return bool(job.techniques.cuda_graphs)

    def pooled(self, job: Job, rows: RankColumns) -> Size:
        """What captured parts save."""
        return captured_activations(job, rows)

    def at_moments(
        self, job: Job, rows: RankColumns, moments: Sequence[Moment], layer: FloatColumn, tables: FloatColumn
    ) -> Sequence[Moment]:
        """A term of graphs, beside the passes and the optimizer's step."""
        *passes, step = moments
        graphs = _executables(job, rows)
        if FULL_ITERATION in job.techniques.cuda_graphs:
            pool = reduce(np.maximum, (reduce(np.add, moment.values()) for moment in passes))
            return [*({**moment, TERM: graphs} for moment in passes), {**step, TERM: graphs + pool}]
        lasting = graphs + _static_buffers(job, rows)
        if _whole_layers(job):  # temporaries of a layer's backward pass are the pool's, and stay while anything runs
            temporary = layer
            beside = [temporary] * (len(passes) - 1) + [np.minimum(layer, np.maximum(tables, 0.0))]
        else:
            temporary = _attention_backward(job, rows) if "attn" in job.techniques.cuda_graphs else np.zeros(len(rows))
            beside = [temporary] * len(passes)
        graphed = [{**moment, TERM: lasting + more} for moment, more in zip(passes, beside, strict=True)]
        return [*graphed, {**step, TERM: lasting + temporary + captured_activations(job, rows)}]


def captured_kernels(techniques: Techniques, mixture: bool) -> tuple[float, float] | None:
    """Return the kernels of one layer that graphs hold, forward and backward; None for all of them."""
    scopes = techniques.cuda_graphs
    if FULL_ITERATION in scopes or WHOLE_LAYER in scopes:
        return None
    counts = [CAPTURED_KERNELS[scope] for scope in _present(techniques, mixture)]
    return sum(forward for forward, _ in counts), sum(backward for _, backward in counts)


def _present(techniques: Techniques, mixture: bool) -> list[str]:
    """Return the captured parts that a layer has."""
    return [scope for scope in techniques.cuda_graphs if scope == "attn" or (scope == "mlp") != mixture]


def _whole_layers(job: Job) -> bool:
    scopes = set(job.techniques.cuda_graphs)
    return WHOLE_LAYER in scopes or (job.shape.moe is None and {"attn", "mlp"} <= scopes)


def captured_activations(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes of saved activations that lie in the graphs' pool, over all micro-batches in flight. With the
    whole iteration captured those are all, which are counted with the pool."""
    if FULL_ITERATION in job.techniques.cuda_graphs:
        return np.zeros(len(rows))
    layers = layers_of(job, rows)
    captured = layers.by_group(layers.each(partial(_captured, job, layers.columns)))
    of_groups = zip(in_flight(job, rows).alive, captured, kept_by_layer(job, rows), strict=True)
    return reduce(np.add, (count * np.minimum(size, kept) for count, size, kept in of_groups))


def _captured(job: Job, c: LayerColumns, layer: Layer, tensors: Tensors) -> FloatColumn:
    """Return the bytes of one layer's saved tensors that its captured parts make."""
    if WHOLE_LAYER in job.techniques.cuda_graphs:
        return sum_without(c, tensors, {})
    beginnings = {name for scope in _present(job.techniques, layer.is_mixture) for name in CAPTURED_TENSORS[scope]}
    if job.techniques.overlap_shared_expert:  # which then runs beside the exchange
        beginnings -= {"shared_"}
    return sum_without(c, tensors, {name: True for name in tensors if not name.startswith(tuple(beginnings))})


def _static_buffers(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the tensors that graphs read their inputs from and leave their results in. A graph's input is a copy of
    its own for every layer and micro-batch in flight, in place of the one that its norm would save, and the gradients
    of inputs and outputs are two buffers for all (`_reuse_graph_input_output_buffers`). Where whole layers are
    captured, a layer's output stays beside the copy that the next layer reads."""
    buffers = 2.0 * layer_input(job, rows)
    if _whole_layers(job):
        buffers = buffers + in_flight(job, rows).layers * layer_input(job, rows)
    return buffers


def _attention_backward(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the temporaries of attention's backward pass in the graphs' pool: the gradients of its output and of Q, K
    and V, its gathered input, and the residual stream's gradient on both sides."""
    layers = layers_of(job, rows)

    def made(attention: SoftmaxAttention, c: LayerColumns) -> FloatColumn:
        heads = c.tokens * (attention.heads + attention.key_value_heads(c)) * sum(attention.head_widths())
        gathered = np.where(c.sequence_split > 1.0, c.tokens, 0.0) * attention.hidden
        stream = 2.0 * c.stream_tokens * attention.hidden
        return np.asarray(c.facts.layer.activation_bytes * (heads / c.tensor + gathered + stream))

    return rows.most_of(layers.by_group(layers.of_blocks(SoftmaxAttention, made)))


def _executables(job: Job, rows: RankColumns) -> FloatColumn:
    """Return what the driver keeps of the instantiated graphs, for every kernel in them. Without a pipeline one
    micro-batch is captured for all, unless two are worked on at once; the whole iteration holds every one of a step."""
    techniques = job.techniques
    several = (rows.layouts.pipeline > 1) | techniques.overlaps_experts
    copies = np.where(several | (FULL_ITERATION in techniques.cuda_graphs), rows.microbatches, 1)
    kinds = layers_of(job, rows).model.kinds
    kernels = rows.sum_of([_kernels(techniques, kinds[group[0]].is_mixture) if group else 0.0 for group in rows.groups])
    return np.asarray(constant("graph_kernel_bytes") * copies * kernels)


def _kernels(techniques: Techniques, mixture: bool) -> float:
    every = sum(CAPTURED_KERNELS["attn"] + CAPTURED_KERNELS["mlp"])
    counts = captured_kernels(techniques, mixture)
    return every if counts is None else sum(counts)


class CudaGraphsTime(TimeEffect):
    """One launch starts all kernels of a graph."""

    def on(self, job: Job) -> bool:
        return bool(job.techniques.cuda_graphs)

    def captured(self, job: Job, mixture: bool) -> Kernels | None:
        """Those of the captured scopes."""
        return captured_kernels(job.techniques, mixture)
