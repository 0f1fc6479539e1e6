"""Recompute of activations: of some of a layer's modules (selective), or of whole layers, whose input is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial, reduce
from operator import or_

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn
from llmlaunch.layers.attention import SoftmaxAttention
from llmlaunch.layers.block import FP32_BYTES, MLP_SHARE, Tensors
from llmlaunch.layers.columns import LayerColumns, Size
from llmlaunch.layers.layer import Layer
from llmlaunch.layers.mlp import Mlp
from llmlaunch.layers.model import model_of
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, LayoutColumns
from llmlaunch.memory.activations import kept_activations
from llmlaunch.memory.effects import Column, Effect
from llmlaunch.memory.job import Job, RankColumns, chunk_ranges
from llmlaunch.memory.layer_bytes import job_columns, layers_of
from llmlaunch.memory.loss import around_head, holds_heads
from llmlaunch.memory.priced_layers import Gone, PricedLayers, by_module, either, sum_without
from llmlaunch.memory.schedule import in_flight
from llmlaunch.models.sections import Vision
from llmlaunch.techniques.treatments import Recompute
from llmlaunch.timing.effects import LayerParts, Repeated, TimeEffect
from llmlaunch.timing.products import DevicePace, SplitColumns, rates

TERM = "recomputed_layer"


class RecomputeEffect(Effect):
    """Layouts say what is recomputed, and the job with which method, and of which modules.

    Full recompute keeps the input of every layer ("uniform", one layer to a checkpoint, or of every few), or recomputes
    some layers of each rank and keeps the others whole ("block"; Megatron `--recompute-num-layers`).
    """

    decides_moments = (Recompute,)
    order = 0  # what is kept of a layer comes before where it is kept

    def kept(self, layers: PricedLayers, kind: int, gone: Gone, kept: Column) -> FloatColumn:
        """All tensors, those that no recomputed module frees, or the layer's input."""
        c, tensors = layers.columns, layers.tensors[kind]

        def part() -> FloatColumn:
            if c.facts.foreign.operators_kept:
                return _kept_operators(layers.model.kinds[kind], c)
            freed = by_module(tensors, lambda tensor: tensor.freed_by, c.recomputes)
            return sum_without(c, tensors, either(freed, gone), recomputed=True)

        return _by_recompute(c.layouts, kept, part, lambda: layers.stream)

    def kept_by_head(self, job: Job, rows: RankColumns, kept: Column, whole: Column) -> FloatColumn:
        """Megatron core knows no block method for heads, and recomputes none."""

        def full() -> FloatColumn:
            return np.zeros(len(rows)) if _recomputes_heads(job) else whole()

        return _by_recompute(rows.layouts, kept, kept, full)

    def saved_share(self, job: Job, rows: RankColumns) -> Size:
        """The share of layer inputs that are saved: uniform full recompute saves one for each group of layers."""
        count = rows.layouts.recompute_layers
        if job.techniques.recompute_method != "uniform" or not np.any(count):
            return 1.0
        return np.where(rows.layouts.recompute == RECOMPUTE_FULL, 1.0 / np.maximum(count, 1), 1.0)

    def saved_besides(self, job: Job, rows: RankColumns) -> Size:
        """What the layers that block recompute leaves whole save beyond their inputs: those of each model chunk behind
        the first ones, which it counts (megatron/core/transformer/transformer_block.py _checkpointed_forward, core
        0.19)."""
        count = rows.layouts.recompute_layers
        if job.techniques.recompute_method != "block" or not np.any(count):
            return 0.0
        layers = layers_of(job, rows)
        more = layers.by_group([total - layers.stream for total in layers.totals])
        blocks = (rows.layouts.recompute == RECOMPUTE_FULL) & (count > 0)
        whole = replace(rows, counts=_left_whole(job, rows))
        return np.where(blocks, in_flight(job, rows).depth * whole.sum_of(more), 0.0)

    def keeps_inputs(self, job: Job, rows: RankColumns) -> bool | BoolColumn:
        """A recomputed layer, or its attention, has the mask among its inputs (tensor_parallel/random.py
        CheckpointFunction, transformer/attention.py _checkpointed_attention_forward, core 0.19)."""
        recompute = rows.layouts.recompute
        attention = np.equal(recompute, RECOMPUTE_SELECTIVE) & job_columns(job, rows.layouts).recomputes("core_attn")
        return np.asarray(np.equal(recompute, RECOMPUTE_FULL) | attention)

    def frees_gathered(self, job: Job, rows: RankColumns) -> bool | BoolColumn:
        """Full recompute saves no views of weights."""
        return np.equal(rows.layouts.recompute, RECOMPUTE_FULL)

    def kept_by_encoder(
        self, job: Job, rows: RankColumns, vision: Vision, of_block: Size, kept: FloatColumn
    ) -> FloatColumn:
        """Full recompute keeps the input of a group of blocks, or takes the first ones alone, as many as of the
        decoder's layers (modelling_qwen3_vl/transformer_block.py _checkpointed_forward, Megatron-Bridge 0.6)."""
        inputs = job.facts.layer.activation_bytes * vision.hidden_size
        again: Size = vision.depth
        if job.techniques.recompute_method == "block":
            count = rows.layouts.recompute_layers
            again = np.where(count > 0, np.minimum(count, vision.depth), vision.depth)
        full = again * inputs / _encoder_group(job, rows, vision) + (vision.depth - again) * of_block
        return np.where(rows.layouts.recompute == RECOMPUTE_FULL, full, kept)

    def encoded_again(self, job: Job, rows: RankColumns, vision: Vision, of_block: Size) -> Size:
        """The blocks of one checkpoint under full recompute."""
        again = of_block * _encoder_group(job, rows, vision)
        return np.where(rows.layouts.recompute == RECOMPUTE_FULL, again, 0.0)

    def beside_layer(self, job: Job, rows: RankColumns) -> Mapping[str, FloatColumn]:
        """What is computed again of the layer before it runs backward."""
        return {TERM: recomputed_layer(job, rows)}

    def after_forward(self, beside: Mapping[str, FloatColumn], rows: RankColumns) -> Size:
        """Modules alone: with full recompute the layer runs forward once more."""
        return np.where(rows.layouts.recompute == RECOMPUTE_FULL, 0.0, beside[TERM])

    def wasted(self, job: Job, rows: RankColumns) -> Size:
        """What is wasted where full recompute's kept layer inputs lie in blocks freed by an MLP, `floor(ffn / hidden)`
        whole ones to a block: once a layer has run, blocks of that size are what its successors find free (replayed
        allocation by allocation on Llama 3 8B: 13 % of the inputs of 64k tokens and more; 14 to 17 % by this
        formula)."""
        shape = job.shape
        whole = shape.ffn_hidden_size // shape.hidden_size
        if shape.moe is not None or shape.mamba is not None or whole < 1:
            return np.zeros(len(rows))
        waste = shape.ffn_hidden_size / shape.hidden_size / whole - 1.0
        return np.where(rows.layouts.recompute == RECOMPUTE_FULL, waste * kept_activations(job, rows), 0.0)


def recomputed_layer(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the activations recomputed before a layer's backward pass: all of the layer with full recompute, those of
    its modules with selective recompute, and the scores with either.

    With the block method the layers saved whole are the last ones and run backward first: what they free is available
    to the first recomputed layer.
    """
    layers, none = layers_of(job, rows), np.zeros(len(rows))

    def full() -> FloatColumn:
        beside_input = layers.by_group([total - layers.stream for total in layers.totals])  # which is kept already
        whole = rows.most_of(beside_input) + _recomputed_head(job, rows)
        count = rows.layouts.recompute_layers
        if job.techniques.recompute_method == "uniform":
            return whole * np.maximum(count, 1)
        of_chunk = rows.layers / rows.layouts.virtual_pipeline
        return whole * np.where(count == 0, 1.0, np.clip(1.0 + count - of_chunk, 0.0, 1.0))

    def modules() -> FloatColumn:
        return rows.most_of(layers.by_group(layers.each(partial(_repeated, layers.columns))))

    return _by_recompute(rows.layouts, lambda: none, modules, full)


def _repeated(c: LayerColumns, layer: Layer, tensors: Tensors) -> FloatColumn:
    """Return what selective recompute computes again of a layer, all that is back at once: the largest of its modules,
    and scores with any."""
    most = c.zeros()
    if c.facts.foreign.operators_kept:
        return sum_without(c, tensors, {}) - _kept_operators(layer, c)
    for module in dict.fromkeys(module for block in layer.blocks for module in block.repeated_modules):
        if np.any(recomputed := c.recomputes(module)):
            back = [tensor.bytes for tensor in tensors.values() if module in tensor.freed_by]
            most = np.maximum(most, np.where(recomputed, sum(back, 0.0), 0.0))
    return tensors["attn_scores"].bytes + most if "attn_scores" in tensors else most


def _kept_operators(layer: Layer, c: LayerColumns) -> FloatColumn:
    """Selective recompute by operator keeps the layer's input, attention's output, and what every second linear puts
    out: of Q, K, V, output, gate, up and down the first, third, fifth and seventh; over tensor ranks also what both
    blocks reduce-scatter (torchtitan, parallelisms/parallelize_llama.py, 9dec370, December 2024;
    distributed/activation_checkpoint.py, b5bcd76). The down projection's output is not read again: compiled code drops
    it, eager code keeps it. Grouped products of experts are none of the operators whose output is kept."""
    attention = next(layer.blocks_of(SoftmaxAttention))
    widths = [mlp.width for mlp in layer.blocks_of(Mlp)]
    if layer.mixture is not None:
        widths.append(layer.mixture.shared_width)
    facts, t, split, h = c.facts, c.tensor, c.sequence_split, attention.hidden
    e, (query, _) = facts.layer.activation_bytes, attention.head_widths()
    linears = e * (attention.heads * query + attention.projected_values(c) + sum(widths)) / t
    output = (e * attention.output_width + FP32_BYTES * attention.heads) / t
    scattered = np.where(t > 1, 2.0 * e * h / split, 0.0)
    last = e * h / split * facts.foreign.unused_outputs_kept * (t == 1)
    return np.asarray(c.tokens * (facts.residual_bytes * h / split + linears + output + scattered + last))


def _by_recompute(layouts: LayoutColumns, none: Column, selective: Column, full: Column) -> FloatColumn:
    """Select each row's value from the column of its recompute granularity, in the order of the RECOMPUTE_ codes. Only
    columns of granularities that occur are computed."""
    columns, recompute = (none, selective, full), layouts.recompute
    chosen: FloatColumn | None = None
    for code in np.flatnonzero(np.bincount(recompute, minlength=len(columns))):
        column = columns[code]()
        chosen = column if chosen is None else np.where(recompute == code, column, chosen)
    return np.zeros(0) if chosen is None else chosen


def _left_whole(job: Job, rows: RankColumns) -> tuple[FloatColumn, ...]:
    """Return the layers of each group that block recompute leaves whole. Where a rank has layers of one group alone,
    their number says it."""
    count, several = rows.layouts.recompute_layers, len(model_of(job.shape).decoder_kinds) > 1
    if not several or rows.groups != model_of(job.shape).single_groups:
        left = np.maximum(rows.layers - count * rows.layouts.virtual_pipeline, 0.0) / np.maximum(rows.layers, 1.0)
        return tuple(held * left for held in rows.counts)
    before = model_of(job.shape).before
    whole = [np.zeros(len(rows)) for _ in before]
    for start, stop in chunk_ranges(job.shape.num_layers, rows.layouts, rows.rank):
        first = np.minimum(start + count, stop)
        for held, earlier in zip(whole, before, strict=True):
            held += earlier[stop] - earlier[first]
    return tuple(whole)


def _recomputed_head(job: Job, rows: RankColumns) -> FloatColumn:
    """Return what full recompute recomputes around a prediction head's layer, beside that layer."""
    if not job.shape.mtp_num_layers:
        return np.zeros(len(rows))
    again = holds_heads(job, rows) & (rows.layouts.recompute == RECOMPUTE_FULL) & _recomputes_heads(job)
    return np.where(again, around_head(job, rows), 0.0)


def _recomputes_heads(job: Job) -> bool:
    return job.techniques.recompute_method != "block"


def _encoder_group(job: Job, rows: RankColumns, vision: Vision) -> Size:
    """Return how many blocks of a vision encoder are one checkpoint, as many as of the decoder's layers."""
    if job.techniques.recompute_method != "uniform":
        return 1.0
    return np.clip(rows.layouts.recompute_layers, 1, vision.depth).astype(np.float64)


ATTENTION, MLP = "attn", "mlp"  # roles of blocks


class RecomputeTime(TimeEffect):
    """Layouts say what is recomputed, and the job with which method, and of which modules."""

    order = 0  # before what other techniques repeat

    def repeated(self, job: Job, at: SplitColumns, pace: DevicePace, parts: LayerParts) -> Repeated | None:
        """Forward work with its communication. Full recompute does all of a layer again, by the method "block" of some
        layers of each model chunk alone. Selective recompute does what its modules name (megatron/core/transformer/
        transformer_layer.py, core 0.19)."""
        recompute = at.layouts.recompute
        if not np.any(recompute):
            return None
        whole = parts.computed.forward + 2.0 * len(parts.layer.branches) * parts.tensor.seconds
        for exchange in (parts.context, parts.expert):
            if exchange is not None:
                whole = whole + exchange.forward
        share = _full_share(job, at)
        full = Repeated(share * whole, share * parts.mlp.kernels[0])
        selective = recompute == RECOMPUTE_SELECTIVE
        if not np.any(selective):
            return full
        some = _of_modules(job, at, pace, parts)
        return Repeated(
            np.where(selective, some.seconds, full.seconds), np.where(selective, some.kernels, full.kernels)
        )


def _full_share(job: Job, at: SplitColumns) -> FloatColumn:
    """Return the share of all layers that full recompute recomputes; 0 where it is not used."""
    lay = at.layouts
    full: FloatColumn = (lay.recompute == RECOMPUTE_FULL).astype(np.float64)
    if job.techniques.recompute_method != "block" or not np.any(lay.recompute_layers):
        return full
    counted = np.minimum(lay.recompute_layers * (at.pipeline * at.chunks) / job.shape.num_layers, 1.0)
    return full * np.where(lay.recompute_layers > 0, counted, 1.0)


def _of_modules(job: Job, at: SplitColumns, pace: DevicePace, parts: LayerParts) -> Repeated:
    """Return the forward seconds of the modules selective recompute names, and their kernels."""
    launched = parts.mlp.kernels[0]
    of_mlp = parts.products_of_every_token(at).forward  # or of a shared expert
    roles = {block.role for block in parts.layer.blocks}

    def has(*names: str) -> bool | BoolColumn:
        return reduce(or_, (at.layer.recomputes(name) for name in names))

    modules: list[tuple[bool | BoolColumn, FloatColumn, float | FloatColumn]] = [(has("layernorm"), parts.norms, 2.0)]
    if ATTENTION in roles:
        attention = parts.softmax.forward
        if parts.context is not None:
            attention = attention + parts.context.forward
        modules.insert(0, (has("core_attn"), attention, 2.0))
    up = [matrix for block in parts.layer.blocks for matrix in block.up_projections]
    if up and np.any(has("mla_up_proj")):
        up_projections = rates(job, pace, up).work(at.tokens, at.share, at.per_tensor)
        modules.append((has("mla_up_proj"), up_projections.forward, 4.0))
    if parts.expert is None and MLP in roles:
        alone = MLP_SHARE if len(roles) > 1 else 1.0
        modules.append((has("mlp"), of_mlp + parts.activation + 2.0 * parts.tensor.seconds, alone * launched))
    if parts.expert is not None:
        assert parts.mlp.experts is not None
        experts = parts.mlp.experts.forward + parts.activation + parts.expert.forward
        modules += [(has("moe"), experts, 0.6 * launched), (has("moe_act"), parts.activation, 1.0)]
        modules.append((has("shared_experts", "moe"), of_mlp, 0.0))
    seconds: FloatColumn = np.zeros(len(at))
    kernels: float | FloatColumn = 0.0 * launched
    for recomputed, more, launches in modules:
        if recomputed is True:
            seconds, kernels = seconds + more, kernels + launches
        elif recomputed is not False:
            share = np.asarray(recomputed, dtype=np.float64)
            seconds, kernels = seconds + share * more, kernels + share * launches
    return Repeated(seconds, kernels)
