"""Activations a pipeline rank saves for the backward pass, over all micro-batches in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.layers.attention import Attention, SoftmaxAttention
from llmlaunch.layers.block import Tensors
from llmlaunch.layers.columns import LayerColumns
from llmlaunch.layers.layer import Layer
from llmlaunch.layers.mixture import Mixture
from llmlaunch.layers.model import model_of
from llmlaunch.layout import RECOMPUTE_FULL
from llmlaunch.memory.job import Job, RankColumns, chunk_ranges, offloads_modules, without_offload
from llmlaunch.memory.layer_bytes import Gone, PricedLayers, either, layers_of, moved
from llmlaunch.memory.paged_stash import STASHED, running_experts
from llmlaunch.memory.schedule import in_flight
from llmlaunch.memory.tokens import layer_input, sequence_split, tokens
from llmlaunch.memory.weights import trained_counts
from llmlaunch.techniques import Techniques

__all__ = [
    "cut_checkpoints",
    "cut_parameters",
    "kept_activations",
    "kept_before_experts",
    "kept_by_heads",
    "kept_by_kind",
    "kept_by_layer",
    "kept_embedding",
    "largest_layer",
    "returned_key_values",
    "swapped_by_layer",
]

BEHIND_THE_ROUTER = ("expert_", "moe_permuted", "moe_latents")  # what begins the names of a mixture's tensors there
ROUNDING_BUFFERS = 2.0


def kept_by_layer(job: Job, rows: RankColumns) -> list[FloatColumn]:
    """Return the bytes that one layer of each group saves on the device for one micro-batch, less what is recomputed
    or offloaded."""
    layers = layers_of(job, rows)
    return layers.by_group(kept_by_kind(job, layers))


def kept_by_heads(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the same of the layers of one prediction module together."""
    layers = layers_of(job, rows)
    return layers.predicted(kept_by_kind(job, layers))


def kept_by_kind(job: Job, layers: PricedLayers) -> list[FloatColumn]:
    """Return what one layer of each kind keeps on the device, over the few splits of `layers`."""
    known: list[FloatColumn] | None = vars(layers).get("kept_by_kind")
    if known is not None:
        return known
    c, stashed = layers.columns, {} if job.techniques.paged_stash is None else dict.fromkeys(STASHED, True)

    def offloaded(layer: Layer, tensors: Tensors) -> Gone:
        return {**moved(c, tensors), **stashed}

    some_offloaded = offloads_modules(job, c.layouts)
    kept = layers.kept(offloaded if some_offloaded else (lambda layer, tensors: stashed) if stashed else None)
    here = 1.0 - job.techniques.offload_fraction
    if some_offloaded and here:
        every = layers.kept(lambda layer, tensors: stashed)
        kept = [np.asarray(here * all_ + (1.0 - here) * left) for all_, left in zip(every, kept, strict=True)]
    vars(layers)["kept_by_kind"] = kept
    return kept


def kept_before_experts(job: Job, rows: RankColumns) -> list[FloatColumn]:
    """Return the bytes that one layer of each group saves before its MLP, or before tokens leave for their experts, for
    one micro-batch, less what is recomputed or offloaded: of a mixture its router and shared expert, too."""
    layers = layers_of(job, rows)

    def gone(layer: Layer, tensors: Tensors) -> Gone:
        prefixes = BEHIND_THE_ROUTER if layer.is_mixture else ("mlp_",)
        others: Gone = {name: True for name in tensors if name.startswith(prefixes)}
        return either(moved(layers.columns, tensors), others)

    return layers.by_group(layers.kept(gone))


def _reloaded(job: Job, rows: RankColumns) -> FloatColumn | float:
    """Return what stays of offloaded modules: their last group, so that its backward pass need not wait
    (fine_grained_activation_offload.py post_warmup_callback, core 0.19): one layer's, one micro-batch's, where a rank
    keeps any."""
    if not offloads_modules(job, rows.layouts):
        return 0.0
    sizes = _moved_by_layer(job, rows)
    return np.minimum(rows.most_of(sizes), _on_device(job, rows, _of_all_layers(job, rows, sizes), sizes))


def _moved_by_layer(job: Job, rows: RankColumns) -> list[FloatColumn]:
    """Return what one layer's offloaded modules save for one micro-batch, of the layers whose modules leave."""
    here, layouts = without_offload(job, rows.layouts)
    on_device = zip(kept_by_layer(here, rows.with_layouts(layouts)), kept_by_layer(job, rows), strict=True)
    fraction = job.techniques.offload_fraction  # which decides how many of the groups move, and not how large they are
    return [(every - left) / fraction for every, left in on_device]


def swapped_by_layer(job: Job, rows: RankColumns) -> list[FloatColumn]:
    """Return the bytes of one layer of each group and micro-batch that wait in host memory, of what it keeps: the
    layer's input and the attention's output whole, since no single token's can be recomputed, and of the rest the
    swapped share of the tokens (MEMO, Zhao et al. 2025, section 4.1)."""
    share, layers = job.techniques.swapped_share, layers_of(job, rows)
    e = job.facts.layer.activation_bytes

    def output(attention: SoftmaxAttention, c: LayerColumns) -> FloatColumn:
        return np.asarray(c.tokens * e * attention.output_width / c.tensor)

    outputs = layers.by_group(layers.of_blocks(SoftmaxAttention, output))
    wholes = zip(kept_by_layer(job, rows), outputs, strict=True)
    pairs = [(np.minimum(layer_input(job, rows) + output, kept), kept) for kept, output in wholes]
    return [whole + share * (kept - whole) for whole, kept in pairs]


def kept_activations(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes saved by the layers, over all micro-batches in flight.

    Full recompute keeps the input of every layer ("uniform", one layer to a checkpoint, or of every few), or
    recomputes some layers of each rank and keeps the others whole ("block"; Megatron `--recompute-num-layers`).
    """
    depth, kept = in_flight(job, rows).depth, kept_by_layer(job, rows)
    layers = _of_all_layers(job, rows, kept) + _block(job, rows, depth)
    layers = _on_device(job, rows, layers, kept) + _reloaded(job, rows) + running_experts(job, rows)
    return np.asarray(layers + _stage_output(job, rows) * depth + _routing_of_last(job, rows))


def largest_layer(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes that the largest layer of a rank keeps on the device, for one micro-batch."""
    return rows.most_of(kept_by_layer(job, rows))


def _of_all_layers(job: Job, rows: RankColumns, of_groups: Sequence[FloatColumn]) -> FloatColumn:
    """Return the bytes of all layers that run backward and all micro-batches in flight, of those of one layer."""
    alive = in_flight(job, rows).alive
    products = [count * size for count, size in zip(alive, of_groups, strict=True)]
    if job.techniques.trained_layers is not None:
        trained = zip(products, trained_counts(job, rows), rows.counts, strict=True)
        products = [product * (of_rank / np.maximum(all_, 1.0)) for product, of_rank, all_ in trained]
    return reduce(np.add, products) * _checkpointed_share(job.techniques, rows)


def _on_device(job: Job, rows: RankColumns, saved_bytes: FloatColumn, of_groups: Sequence[FloatColumn]) -> FloatColumn:
    """Return the part of `saved_bytes`, the activations of all layers of a rank over the micro-batches in flight, that
    does not wait in host memory. A layer of each group saves `of_groups` bytes for one micro-batch."""
    techniques = job.techniques
    if not (techniques.offload_checkpoints or techniques.swapped_share or np.any(rows.layouts.offload_layers)):
        return saved_bytes
    largest = rows.most_of(of_groups) * _checkpointed_share(techniques, rows)
    left = _first_layers(job, rows, _checkpoints(job, rows, saved_bytes, largest), largest, of_groups)
    # The rounding buffers hold a layer each; what is not swapped is recomputed into them (MEMO, Zhao et al. 2025,
    # section 4): whatever the share, nothing else of a layer stays. What-if.
    return np.minimum(left, ROUNDING_BUFFERS * largest) if techniques.swapped_share else left


def _checkpoints(job: Job, rows: RankColumns, saved_bytes: FloatColumn, layer_bytes: FloatColumn) -> FloatColumn:
    """The layer inputs of full recompute on the host (ZeRO-Infinity, Rajbhandari et al. 2021, section 5.1)."""
    if not job.techniques.offload_checkpoints:
        return saved_bytes
    travelling = np.minimum(saved_bytes, job.facts.layer.travelling_checkpoints * layer_bytes)
    return np.where(rows.layouts.recompute == RECOMPUTE_FULL, travelling, saved_bytes)


def _first_layers(
    job: Job, rows: RankColumns, saved_bytes: FloatColumn, layer_bytes: FloatColumn, of_groups: Sequence[FloatColumn]
) -> FloatColumn:
    """The first layers of each rank on the host, whole (KARMA, Wahib et al. 2020; Megatron
    `--cpu-offloading-num-layers`). Of L layers, N offloaded, layer i has left before layer L - N + i runs forward and
    comes back when that layer has run backward, so that never more than L - N layers, one behind the other, are on the
    device (transformer_engine/pytorch/cpu_offload.py DefaultOffloadSynchronizer, 2.20); the one that runs always is."""
    if not np.any(rows.layouts.offload_layers):
        return saved_bytes
    layers = np.maximum(rows.layers, 1.0)
    offloaded = np.minimum(rows.layouts.offload_layers, layers)
    share = 1.0 - offloaded / layers
    if rows.groups == model_of(job.shape).single_groups:
        share = _heaviest_share(job, rows, offloaded, share, of_groups)
    left = np.maximum(saved_bytes * share, np.minimum(saved_bytes, layer_bytes))
    return np.where(offloaded > 0, left, saved_bytes)


def _heaviest_share(
    job: Job, rows: RankColumns, offloaded: FloatColumn, share: FloatColumn, of_groups: Sequence[FloatColumn]
) -> FloatColumn:
    """Return the share of what all layers save that those save which are on the device at once, if they are the
    heaviest of so many that follow each other; `share` where layers are alike. The layers of a stage are those of the
    whole model, since there is no pipeline beside it (transformer_config.py, core 0.19)."""
    model = model_of(job.shape)
    if len(model.decoder_kinds) == 1:
        return share
    heaviest: FloatColumn = share.copy()
    every = np.maximum(rows.sum_of(of_groups), 1.0)
    count = len(model.order)
    for moved_layers in np.unique(offloaded[rows.layouts.pipeline == 1]).astype(np.int64).tolist():
        some = np.flatnonzero((offloaded == moved_layers) & (rows.layouts.pipeline == 1))
        windows = np.stack([before[count - moved_layers :] - before[: moved_layers + 1] for before in model.before])
        saved = np.tensordot(windows.T, np.stack([np.broadcast_to(size, len(rows))[some] for size in of_groups]), 1)
        heaviest[some] = saved.max(axis=0) / every[some]
    return heaviest


def _routing_of_last(job: Job, rows: RankColumns) -> FloatColumn | float:
    """Return what the dispatcher of every layer still holds of its last micro-batch."""
    if not job.facts.mixture.router_last_bytes or not any(layer.is_mixture for layer in model_of(job.shape).kinds):
        return 0.0
    layers = layers_of(job, rows)
    each = job.facts.mixture.router_last_bytes * layers.columns.stream_tokens

    def of_layer(layer: Layer, tensors: Tensors) -> FloatColumn:
        return float(sum(block.experts for block in layer.blocks_of(Mixture))) * each

    return rows.sum_of(layers.by_group(layers.each(of_layer)))


def _stage_output(job: Job, rows: RankColumns) -> FloatColumn | float:
    """Return what all but the last rank keep of the tensor they sent on, for one micro-batch."""
    if not job.facts.foreign.stage_output_bytes:
        return 0.0
    share = job.facts.foreign.stage_output_bytes * job.shape.stream_width / rows.tensor
    return np.where(rows.last, 0.0, tokens(job, rows) * share)


def cut_checkpoints(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes wasted where full recompute's kept layer inputs lie in blocks freed by an MLP, `floor(ffn /
    hidden)` whole ones to a block: once a layer has run, blocks of that size are what its successors find free
    (replayed allocation by allocation on Llama 3 8B: 13 % of the inputs of 64k tokens and more; 14 to 17 % by this
    formula)."""
    shape = job.shape
    whole = shape.ffn_hidden_size // shape.hidden_size
    if not job.facts.allocator.cut_checkpoints or shape.moe is not None or shape.mamba is not None or whole < 1:
        return np.zeros(len(rows))
    waste = shape.ffn_hidden_size / shape.hidden_size / whole - 1.0
    return np.where(rows.layouts.recompute == RECOMPUTE_FULL, waste * kept_activations(job, rows), 0.0)


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


def _checkpointed_share(techniques: Techniques, rows: RankColumns) -> FloatColumn | float:
    """Return the share of layer inputs that are saved: uniform full recompute saves one for each group of layers."""
    count = rows.layouts.recompute_layers
    if techniques.recompute_method != "uniform" or not np.any(count):
        return 1.0
    return np.where(rows.layouts.recompute == RECOMPUTE_FULL, 1.0 / np.maximum(count, 1), 1.0)


def _block(job: Job, rows: RankColumns, depth: FloatColumn) -> FloatColumn | float:
    """Return what the layers that block recompute leaves whole save beyond their inputs: those of each model chunk
    behind the first ones, which it counts (megatron/core/transformer/transformer_block.py _checkpointed_forward, core
    0.19)."""
    count = rows.layouts.recompute_layers
    if job.techniques.recompute_method != "block" or not np.any(count):
        return 0.0
    layers = layers_of(job, rows)
    more = layers.by_group([total - layers.stream for total in layers.totals])
    blocks = (rows.layouts.recompute == RECOMPUTE_FULL) & (count > 0)
    whole = replace(rows, counts=_left_whole(job, rows))
    return np.where(blocks, depth * whole.sum_of(more), 0.0)


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
