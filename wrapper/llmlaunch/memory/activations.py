"""Activations a pipeline rank saves for the backward pass, over all micro-batches in flight."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn
from llmlaunch.layers.attention import Attention
from llmlaunch.layers.block import Tensors
from llmlaunch.layers.columns import Size
from llmlaunch.layers.layer import Layer
from llmlaunch.layers.model import model_of
from llmlaunch.memory.answers import once_for_rows
from llmlaunch.memory.effects import Column, Effect, effects_in_use, effects_of
from llmlaunch.memory.job import Job, RankColumns, head_rank
from llmlaunch.memory.layer_bytes import layers_of
from llmlaunch.memory.priced_layers import Gone, PricedLayers, either, sum_without
from llmlaunch.memory.schedule import in_flight
from llmlaunch.memory.tokens import sequence_split, tokens

BEHIND_THE_ROUTER = ("expert_", "moe_permuted", "moe_latents")  # what begins the names of a mixture's tensors there


def kept_by_layer(job: Job, rows: RankColumns) -> list[FloatColumn]:
    """Return the bytes that one layer of each group saves on the device for one micro-batch, less what is recomputed
    or offloaded."""
    return layers_of(job, rows).by_group(kept_by_kind(job, rows))


def kept_by_heads(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the same of the layers of one prediction module together."""
    return layers_of(job, rows).predicted(kept_by_kind(job, rows))


@once_for_rows
def kept_by_kind(job: Job, rows: RankColumns) -> list[FloatColumn]:
    """Return what one layer of each kind keeps on the device, over the few splits of the rows' layers."""
    layers = layers_of(job, rows)
    nothing: Sequence[Gone] = [{}] * len(layers.model.kinds)
    kept = _kept(job, layers, nothing)
    for effect in effects_in_use(job):
        share = effect.gone_share(job, layers.columns.layouts)
        if share < 1.0:
            every, here = _kept(job, layers, nothing, without=effect), 1.0 - share
            kept = [np.asarray(here * all_ + (1.0 - here) * left) for all_, left in zip(every, kept, strict=True)]
    return kept


def _kept(job: Job, layers: PricedLayers, gone: Sequence[Gone], without: Effect | None = None) -> list[FloatColumn]:
    """Return what a layer of each kind keeps beside the tensors that are `gone`, and those that any effect takes away,
    but for the one that is left out."""
    sizes = []
    for kind, away in enumerate(gone):
        for effect in effects_in_use(job):
            taken = {} if effect is without else effect.gone(layers.columns, layers.tensors[kind])
            away = either(taken, away) if taken else away
        kept: Column = partial(_beside, layers, kind, away)
        for change in effects_of(job, Effect.kept):
            kept = partial(change, layers, kind, away, kept)
        sizes.append(kept())
    return sizes


def _beside(layers: PricedLayers, kind: int, gone: Gone) -> FloatColumn:
    return sum_without(layers.columns, layers.tensors[kind], gone) if gone else layers.totals[kind]


def kept_before_experts(job: Job, rows: RankColumns) -> list[FloatColumn]:
    """Return the bytes that one layer of each group saves before its MLP, or before tokens leave for their experts, for
    one micro-batch, less what is recomputed or offloaded: of a mixture its router and shared expert, too."""

    def behind(layer: Layer, tensors: Tensors) -> Gone:
        prefixes = BEHIND_THE_ROUTER if layer.is_mixture else ("mlp_",)
        return {name: True for name in tensors if name.startswith(prefixes)}

    layers = layers_of(job, rows)
    gone = [behind(layer, tensors) for layer, tensors in zip(layers.model.kinds, layers.tensors, strict=True)]
    return layers.by_group(_kept(job, layers, gone))


def kept_activations(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes saved by the layers, over all micro-batches in flight, that are on the device."""
    kept = kept_by_layer(job, rows)
    layers = of_all_layers(job, rows, kept)
    for effect in effects_of(job, Effect.saved_besides):
        layers = layers + effect(job, rows)
    layers = on_device(job, rows, layers, kept)
    for effect in effects_of(job, Effect.back_on_device):
        layers = layers + effect(job, rows)
    return np.asarray(layers + _stage_output(job, rows) * in_flight(job, rows).depth + _routing_of_last(job, rows))


def largest_layer(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes that the largest layer of a rank keeps on the device, for one micro-batch."""
    return rows.most_of(kept_by_layer(job, rows))


def of_all_layers(job: Job, rows: RankColumns, of_groups: Sequence[FloatColumn]) -> FloatColumn:
    """Return the bytes of all layers that run backward and all micro-batches in flight, of those of one layer."""
    alive = in_flight(job, rows).alive
    products: Sequence[FloatColumn] = [count * size for count, size in zip(alive, of_groups, strict=True)]
    for effect in effects_of(job, Effect.saved_by_groups):
        products = effect(job, rows, products)
    return reduce(np.add, products) * saved_share(job, rows)


def saved_share(job: Job, rows: RankColumns) -> Size:
    """Return the share of what layers keep that is saved."""
    share: Size = 1.0
    for effect in effects_of(job, Effect.saved_share):
        share = share * effect(job, rows)
    return share


def on_device(job: Job, rows: RankColumns, saved_bytes: FloatColumn, of_groups: Sequence[FloatColumn]) -> FloatColumn:
    """Return the part of `saved_bytes`, the activations of all layers of a rank over the micro-batches in flight, that
    does not wait in host memory. A layer of each group saves `of_groups` bytes for one micro-batch."""
    for effect in effects_of(job, Effect.on_device):
        saved_bytes = effect(job, rows, saved_bytes, of_groups)
    return saved_bytes


def _routing_of_last(job: Job, rows: RankColumns) -> FloatColumn | float:
    """Return what the dispatcher of every layer still holds of its last micro-batch."""
    if not job.facts.mixture.router_last_bytes or not any(layer.is_mixture for layer in model_of(job.shape).kinds):
        return 0.0
    layers = layers_of(job, rows)
    each = job.facts.mixture.router_last_bytes * layers.columns.stream_tokens

    def of_layer(layer: Layer, tensors: Tensors) -> FloatColumn:
        return (0.0 if layer.mixture is None else float(layer.mixture.experts)) * each

    return rows.sum_of(layers.by_group(layers.each(of_layer)))


def _stage_output(job: Job, rows: RankColumns) -> FloatColumn | float:
    """Return what all but the last rank keep of the tensor they sent on, for one micro-batch."""
    if not job.facts.foreign.stage_output_bytes:
        return 0.0
    share = job.facts.foreign.stage_output_bytes * job.shape.stream_width / rows.tensor
    return np.where(rows.last, 0.0, tokens(job, rows) * share)


def cut_parameters(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes wasted where activations lie in the segments that the matrices of the blocks were made in before
    they moved to one buffer: hidden-wide tensors fit whole times into a matrix, and what is left holds none of them.
    The cache of mixtures is counted as a share.

    Replayed allocation by allocation (Megatron core 0.19, traced), the allocator without expandable segments is 1.5 %
    off what eight B200s reserved (SimuMax, 20 peaks; docs/tracing.md), and these are the pieces it leaves."""
    shape = job.shape
    if shape.moe is not None or shape.mla is not None or shape.mamba is not None:
        return np.zeros(len(rows))
    layers = layers_of(job, rows)
    c, hidden = layers.columns, layers.stream

    def wasted(layer: Layer, tensors: Tensors) -> FloatColumn:
        sizes = (job.facts.states.parameter_bytes * matrix.elements_on_device(c) for matrix in layer.matrices)
        return reduce(np.add, (np.fmod(size, hidden) for size in sizes))

    return np.where(rows.layouts.zero_stage >= 1, rows.sum_of(layers.by_group(layers.each(wasted))), 0.0)


def kept_embedding(job: Job, rows: RankColumns) -> FloatColumn:
    """Return for the first rank int64 token ids, their labels, positions and loss mask; what the embedding's norm and
    dropout keep, where it has them; and the cosines and sines that all layers read, where they are not made inside a
    kernel."""
    mask = float(job.shape.hidden_size) if job.shape.hidden_dropout > 0 else 0.0
    norm = job.facts.layer.activation_bytes * job.shape.hidden_size if job.facts.foreign.embedding_norm else 0.0
    turns = job.facts.attention.rotary_bytes * job.shape.head_dim if job.shape.position_embedding == "rope" else 0.0
    embedding = tokens(job, rows) * (32.0 + turns + (mask + norm) / sequence_split(job, rows))
    return np.where(rows.first, embedding * in_flight(job, rows).depth, 0.0)


def returned_key_values(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the keys and values of every layer where the model returns them, recomputed or not."""
    layers = layers_of(job, rows)
    c, each = layers.columns, 2.0 * job.facts.layer.activation_bytes * job.facts.foreign.key_values_returned

    def returned(layer: Layer, tensors: Tensors) -> FloatColumn:
        widths = (np.maximum(block.groups, c.tensor) * block.head_dim for block in layer.blocks_of(Attention))
        return c.tokens * each * reduce(np.add, widths, c.zeros()) / c.tensor

    return rows.sum_of(layers.by_group(layers.each(returned)))


Terms = dict[str, FloatColumn]
TERM = "attention_masks"


def loads_batches(job: Job, rows: RankColumns) -> BoolColumn:
    """Return whether each row's rank gets the tokens of a batch: the first and the last pipeline rank, and that of
    prediction heads (megatron/core/utils.py get_batch_on_this_tp_rank, core 0.19)."""
    return np.asarray(rows.first | rows.last | np.equal(rows.rank, head_rank(job, rows.layouts)))


def kept_masks(job: Job, rows: RankColumns) -> Terms:
    """Return the masks that are kept for the backward pass, one for each micro-batch in flight, where a technique keeps
    what its layers read."""
    if not _mask_bytes(job):
        return {}
    return {TERM: np.where(_keeps(job, rows), _share(job, rows) * in_flight(job, rows).depth, 0.0)}


def arriving_mask(job: Job, rows: RankColumns, freed: FloatColumn) -> Terms:
    """Return the masks that are there until the loss is computed: those that are kept and that of the micro-batch that
    runs forward, or what is more of it when it arrives, `freed` bytes before the loss.

    Every tensor rank has it whole, then context parallelism copies its share of the rows
    (megatron/core/utils.py get_batch_on_this_tp_rank and _get_batch_on_this_cp_rank_per_sequence_balancing, core 0.19).
    """
    if not _mask_bytes(job):
        return {}
    share = _share(job, rows)
    whole = share * rows.layouts.context
    arrives = np.where(rows.layouts.context > 1, whole + share, whole)
    kept = kept_masks(job, rows)[TERM]
    earlier = np.where(_keeps(job, rows), kept - share, 0.0)
    return {TERM: earlier + np.maximum(share, arrives - freed)}


def _share(job: Job, rows: RankColumns) -> FloatColumn:
    lay, length = rows.layouts, float(job.workload.sequence_length)
    square = lay.micro_batch_size * length**2 / lay.context
    return np.where(loads_batches(job, rows), _mask_bytes(job) * square, 0.0)


def _mask_bytes(job: Job) -> float:
    """Return the bytes of masks per pair of tokens: a boolean that the loader makes, and those of packed rows, which
    Transformers makes of their positions (masking_utils.py create_causal_mask, 5.23)."""
    return float(job.facts.host.loader_mask) + job.facts.attention.row_mask_bytes


def _keeps(job: Job, rows: RankColumns) -> BoolColumn:
    kept = (effect(job, rows) for effect in effects_of(job, Effect.keeps_inputs))
    return reduce(np.logical_or, kept, np.zeros(len(rows), dtype=np.bool_))
