"""Activations a pipeline rank saves for the backward pass, over all micro-batches in flight."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn
from llmlaunch.layout import RECOMPUTE_FULL
from llmlaunch.memory.job import (
    Job,
    RankColumns,
    alike_parts,
    by_recompute,
    mean_of_kinds,
    offloads,
    offloads_modules,
    recomputes,
    without_offload,
)
from llmlaunch.memory.paged_stash import STASHED, running_experts
from llmlaunch.memory.saved import (
    Gone,
    SavedTensors,
    kept_operators,
    leaves_device,
    on_device,
    saved_by_dense_layer,
    saved_by_mixture_layer,
    sequence_split,
    tokens,
)
from llmlaunch.memory.schedule import in_flight
from llmlaunch.memory.weights import matrices, trained_layers
from llmlaunch.techniques import Techniques

__all__ = [
    "RECOMPUTED",
    "Kept",
    "cut_checkpoints",
    "cut_parameters",
    "kept_activations",
    "kept_before_experts",
    "kept_by_layer",
    "kept_embedding",
    "largest_layer",
    "layer_input",
    "returned_key_values",
    "swapped_bytes",
]

NORM_INPUTS = ("attn_norm_input", "mlp_norm_input")
NORM_OUTPUTS = ("attn_norm_output", "mlp_norm_output")

Kept = tuple[FloatColumn, FloatColumn]  # bytes of one dense and of one mixture layer, one micro-batch
OfLayer = Callable[[Job, RankColumns], Kept]

# What each of Megatron's `--recompute-modules` frees (transformer_layer.py, mlp.py, moe/, core 0.19); "layernorm"
# and the norms are in `_recomputed_norms`.
RECOMPUTED: dict[str, tuple[str, ...]] = {
    "core_attn": ("attn_scores", "attn_chosen", "attn_latent_output"),
    "mla_up_proj": ("attn_latents_normed", "attn_qkv"),
    "mlp": ("mlp_fc1_output", "mlp_fc2_input", "mlp_adapters"),
    "moe": (
        "moe_router",
        "expert_fc1_input",
        "expert_fc1_output",
        "expert_fc2_input",
        "expert_clamped",
        "moe_permuted_output",
        "moe_latents",
        "shared_fc1_output",
        "shared_fc2_input",
        "expert_adapters",
        "shared_adapters",
    ),
    "moe_act": ("expert_fc2_input", "expert_clamped"),
    "shared_experts": ("shared_fc1_output", "shared_fc2_input", "shared_adapters"),
}

# What each of Megatron's `--offload-modules` moves to the host: all that autograd saves inside the module
# (pipeline_parallel/fine_grained_activation_offload.py, core 0.19).
OFFLOADED: dict[str, tuple[str, ...]] = {
    "qkv_linear": ("attn_norm_output", "attn_latents", "attn_latents_normed"),
    "core_attn": ("attn_qkv", "attn_qk_norm", "attn_scores"),
    "attn_proj": ("attn_output", "attn_proj_input"),
    "expert_fc1": ("expert_fc1_input",),
    "moe_act": ("expert_fc1_output",),
}


def kept_by_layer(job: Job, rows: RankColumns) -> Kept:
    """Return the bytes one layer saves on the device for one micro-batch, less what is recomputed or offloaded."""
    dense = _kept(job, rows, saved_by_dense_layer, job.shape.ffn_hidden_size)
    moe = job.shape.moe
    if moe is None:
        return dense, np.zeros(len(rows))
    return dense, _kept(job, rows, saved_by_mixture_layer, moe.shared_expert_ffn_hidden_size)


def kept_before_experts(job: Job, rows: RankColumns) -> Kept:
    """Return the bytes that one layer saves before its MLP, or before tokens leave for their experts, for one
    micro-batch, less what is recomputed or offloaded: of a mixture its router and shared expert, too."""
    dense, moe = saved_by_dense_layer(job, rows), job.shape.moe
    without_mlp = _kept_beside(job, rows, dense, job.shape.ffn_hidden_size, ("mlp_",))
    if moe is None:
        return without_mlp, np.zeros(len(rows))
    mixture, width = saved_by_mixture_layer(job, rows), moe.shared_expert_ffn_hidden_size
    return without_mlp, _kept_beside(job, rows, mixture, width, ("expert_", "moe_permuted", "moe_latents"))


def _kept_beside(
    job: Job, rows: RankColumns, layer: SavedTensors, mlp_width: int, prefixes: tuple[str, ...]
) -> FloatColumn:
    """Return what a layer keeps beside the tensors whose names begin with the `prefixes`."""
    others: Gone = {name: True for name in layer.tensors if name.startswith(prefixes)}
    offloaded = _offloaded(job, rows, layer) if offloads_modules(job, rows.layouts) else {}
    return _kept_of(job, rows, layer, mlp_width, {**offloaded, **others})


def _kept(
    job: Job, rows: RankColumns, saved: Callable[[Job, RankColumns], SavedTensors], mlp_width: int
) -> FloatColumn:
    layer = saved(job, rows)
    stashed: Gone = {} if job.techniques.paged_stash is None else dict.fromkeys(STASHED, True)
    offloaded = _offloaded(job, rows, layer) if offloads_modules(job, rows.layouts) else {}
    here = 1.0 - job.techniques.offload_fraction
    if offloaded and here:
        every, left = (_kept_of(job, rows, layer, mlp_width, {**tensors, **stashed}) for tensors in ({}, offloaded))
        return np.asarray(here * every + (1.0 - here) * left)
    return _kept_of(job, rows, layer, mlp_width, {**offloaded, **stashed})


def _kept_of(job: Job, rows: RankColumns, layer: SavedTensors, mlp_width: int, offloaded: Gone) -> FloatColumn:
    """Return what a layer keeps beside its `offloaded` tensors, those in pages among them, and what is recomputed."""

    def whole() -> FloatColumn:
        return layer.without(offloaded) if offloaded else layer.total

    def part() -> FloatColumn:
        if job.facts.operators_kept:
            return kept_operators(job, rows, mlp_width)
        left = layer.without(_either(_recomputed(job, rows, layer), offloaded))
        values = recomputes(job, rows.layouts, "core_attn")
        return left + np.where(values, _uncopied_values(job, rows), 0.0) if np.any(values) else left

    return by_recompute(rows, whole, part, lambda: layer_input(job, rows))


def _recomputed(job: Job, rows: RankColumns, layer: SavedTensors) -> Gone:
    """Return the tensors that selective recompute frees.

    "layernorm" takes the norms before latent attention and before a mixture. The others are fused into the linear after
    them, where the flag changes nothing, and the one fused into a dense MLP goes with "mlp"
    (megatron/core/models/gpt/gpt_layer_specs.py, transformer/transformer_layer.py, core 0.19; traced)."""
    mixture, layouts = "expert_fc1_input" in layer.tensors, rows.layouts
    attention = job.shape.mla is not None and recomputes(job, layouts, "layernorm")
    mlp = recomputes(job, layouts, "layernorm" if mixture else "mlp")
    by_module = {name: recomputes(job, layouts, name) for name in RECOMPUTED}
    return _either(_tensors(RECOMPUTED, by_module), dict(zip(NORM_OUTPUTS, (attention, mlp), strict=True)))


def _offloaded(job: Job, rows: RankColumns, layer: SavedTensors) -> Gone:
    """Return the tensors that leave the device, inputs of norms among them. A norm fused into the linear after it is
    no module of its own: "attn_norm" is one before latent attention and "mlp_norm" before a mixture, elsewhere they
    change nothing, and what the norm before Q, K and V keeps goes with "qkv_linear" (transformer_layer.py
    _set_offload_modules, core 0.19)."""
    mixture, layouts = "expert_fc1_input" in layer.tensors, rows.layouts
    attention = offloads(job, layouts, "attn_norm" if job.shape.mla is not None else "qkv_linear")
    mlp = mixture and offloads(job, layouts, "mlp_norm")
    by_module = {name: offloads(job, layouts, name) for name in OFFLOADED}
    return _either(_tensors(OFFLOADED, by_module), dict(zip(NORM_INPUTS, (attention, mlp), strict=True)))


def _reloaded(job: Job, rows: RankColumns) -> FloatColumn | float:
    """Return what stays of offloaded modules: their last group, so that its backward pass need not wait
    (fine_grained_activation_offload.py post_warmup_callback, core 0.19): one layer's, one micro-batch's, where a rank
    keeps any."""
    if not offloads_modules(job, rows.layouts):
        return 0.0
    moved = _moved_by_layer(job, rows)
    largest = _largest_of_parts(job, rows, _moved_by_layer)
    return np.minimum(largest, _on_device(job, rows, _of_all_layers(job, rows, moved), _moved_by_layer))


def _moved_by_layer(job: Job, rows: RankColumns) -> Kept:
    """Return what one layer's offloaded modules save for one micro-batch, of the layers whose modules leave."""
    here, layouts = without_offload(job, rows.layouts)
    (dense, mixture), (dense_left, mixture_left) = (
        kept_by_layer(here, rows.with_layouts(layouts)),
        kept_by_layer(job, rows),
    )
    fraction = job.techniques.offload_fraction  # which decides how many of the groups move, and not how large they are
    return (dense - dense_left) / fraction, (mixture - mixture_left) / fraction


def _tensors(table: dict[str, tuple[str, ...]], modules: Gone) -> Gone:
    """Return for each tensor of a table whether any of its modules is gone."""
    gone: dict[str, bool | BoolColumn] = {}
    for module, of_module in modules.items():
        for name in table[module]:
            gone[name] = gone[name] | of_module if name in gone else of_module
    return gone


def _either(some: Gone, others: Gone) -> Gone:
    return {**some, **{name: some[name] | gone if name in some else gone for name, gone in others.items()}}


def layer_input(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes of one layer's input for one micro-batch."""
    return tokens(job, rows) * job.facts.residual_bytes * job.shape.stream_width / sequence_split(job, rows)


def swapped_bytes(job: Job, rows: RankColumns, saved_bytes: FloatColumn) -> FloatColumn:
    """Return the bytes of one layer and micro-batch that wait in host memory, of `saved_bytes`: the layer's input and
    the attention's output whole, since no single token's can be recomputed, and of the rest the swapped share of the
    tokens (MEMO, Zhao et al. 2025, section 4.1)."""
    share, width = job.techniques.swapped_share, job.shape.query_width
    attention = tokens(job, rows) * job.facts.activation_bytes * width / rows.tensor
    whole = np.minimum(layer_input(job, rows) + attention, saved_bytes)
    return whole + share * (saved_bytes - whole)


def _uncopied_values(job: Job, rows: RankColumns) -> FloatColumn:
    """Return what recomputed attention saves more. Flash attention keeps Q and K and V as they enter it. With rotary
    positions Q and K are new tensors and V is a view of the mixed projection, which stays alive whole; without
    recompute Transformer Engine copies V and the projection goes (traced, core 0.19.2 with Transformer Engine 2.20:
    12.72 against 12.11 GiB on Llama 3 8B)."""
    shape = job.shape
    if shape.position_embedding != "rope" or shape.mla is not None or job.facts.attention_scores_saved:
        return np.zeros(len(rows))
    if shape.compressed_attention is not None:
        return np.zeros(len(rows))
    t = rows.tensor
    width: FloatColumn = shape.query_width + np.maximum(shape.num_query_groups, t) * float(shape.head_dim)
    if rows.shares is not None:
        width = width * rows.shares.get("attention", np.zeros(len(rows)))
    elif shape.linear_attention is not None or shape.mamba is not None:
        return np.zeros(len(rows))
    return tokens(job, rows) * job.facts.activation_bytes * width / t


def kept_activations(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes saved by the layers, over all micro-batches in flight.

    Full recompute keeps the input of every layer ("uniform", one layer to a checkpoint, or of every few), or
    recomputes some layers of each rank and keeps the others whole ("block"; Megatron `--recompute-num-layers`).
    """
    depth = in_flight(job, rows).depth
    layers = _of_all_layers(job, rows, kept_by_layer(job, rows)) + _block(job, rows, depth)
    layers = _on_device(job, rows, layers, kept_by_layer) + _reloaded(job, rows) + running_experts(job, rows)
    return np.asarray(layers + _stage_output(job, rows) * depth + _routing_of_last(job, rows))


def _on_device(job: Job, rows: RankColumns, saved_bytes: FloatColumn, of_layer: OfLayer) -> FloatColumn:
    if not leaves_device(job, rows):
        return saved_bytes
    largest = _largest_of_parts(job, rows, of_layer)
    return on_device(job, rows, saved_bytes, largest * _checkpointed_share(job.techniques, rows))


def largest_layer(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes that the largest layer of a rank keeps on the device, for one micro-batch."""
    return _largest_of_parts(job, rows, kept_by_layer)


def _largest_of_parts(job: Job, rows: RankColumns, of_layer: OfLayer) -> FloatColumn:
    """Return what `of_layer` gives for the largest layer that a rank has, where layers differ in their parts: a buffer
    that takes one layer after the other is as large as the largest, not as their mean."""
    return reduce(np.maximum, (_largest(alike, of_layer(job, alike)) for alike in alike_parts(job, rows)))


def _largest(rows: RankColumns, by_kind: Kept) -> FloatColumn:
    dense, mixture = by_kind
    return np.maximum(np.where(rows.dense_layers > 0, dense, 0.0), np.where(rows.moe_layers > 0, mixture, 0.0))


def _of_all_layers(job: Job, rows: RankColumns, by_kind: Kept) -> FloatColumn:
    """Return the bytes of all layers that run backward and all micro-batches in flight, of those of one layer."""
    alive, (share_dense, share_mixture) = in_flight(job, rows), _trained_share(job, rows)
    saved_bytes = alive.dense * by_kind[0] * share_dense
    if job.shape.moe is not None:
        saved_bytes = saved_bytes + alive.mixture * by_kind[1] * share_mixture
    return saved_bytes * _checkpointed_share(job.techniques, rows)


def _routing_of_last(job: Job, rows: RankColumns) -> FloatColumn | float:
    """Return what the dispatcher of every layer still holds of its last micro-batch."""
    moe = job.shape.moe
    if moe is None or not job.facts.router_last_bytes:
        return 0.0
    each = tokens(job, rows) / sequence_split(job, rows) * moe.num_experts
    return rows.moe_layers * each * job.facts.router_last_bytes


def _trained_share(job: Job, rows: RankColumns) -> tuple[FloatColumn | float, FloatColumn | float]:
    """Return the shares of the rank's (dense, mixture) layers that run backward."""
    if job.techniques.trained_layers is None:
        return 1.0, 1.0
    dense, mixture = trained_layers(job, rows)
    return dense / np.maximum(rows.dense_layers, 1.0), mixture / np.maximum(rows.moe_layers, 1.0)


def _stage_output(job: Job, rows: RankColumns) -> FloatColumn | float:
    """Return what all but the last rank keep of the tensor they sent on, for one micro-batch."""
    if not job.facts.stage_output_bytes:
        return 0.0
    share = job.facts.stage_output_bytes * job.shape.stream_width / rows.tensor
    return np.where(rows.last, 0.0, tokens(job, rows) * share)


def cut_checkpoints(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes wasted where full recompute's kept layer inputs lie in blocks freed by an MLP, `floor(ffn /
    hidden)` whole ones to a block: once a layer has run, blocks of that size are what its successors find free
    (replayed allocation by allocation on Llama 3 8B: 13 % of the inputs of 64k tokens and more; 14 to 17 % by this
    formula)."""
    shape = job.shape
    whole = shape.ffn_hidden_size // shape.hidden_size
    if not job.facts.cut_checkpoints or shape.moe is not None or shape.mamba is not None or whole < 1:
        return np.zeros(len(rows))
    waste = shape.ffn_hidden_size / shape.hidden_size / whole - 1.0
    return np.where(rows.layouts.recompute == RECOMPUTE_FULL, waste * kept_activations(job, rows), 0.0)


def cut_parameters(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes wasted where activations lie in the segments that the matrices of the blocks were made in before
    they moved to one buffer: hidden-wide tensors fit whole times into a matrix, and what is left holds none of them.
    The cache of mixtures is counted as a share.

    Replayed allocation by allocation (Megatron core 0.19, traced), the allocator without expandable segments is 1.5 %
    off what eight B200s reserved (SimuMax, 20 peaks; docs/tracing.md), and these are the pieces it leaves."""
    shape, t = job.shape, rows.tensor
    if shape.moe is not None or shape.mla is not None or shape.mamba is not None:
        return np.zeros(len(rows))
    hidden = layer_input(job, rows)
    first, second = matrices(job, rows).dense
    query = shape.hidden_size * shape.query_width / t
    key_value = shape.hidden_size * np.maximum(shape.num_query_groups / t, 1.0) * shape.head_dim
    width = job.facts.parameter_bytes
    wasted = sum(np.fmod(width * each, hidden) for each in (first, second, query + 2.0 * key_value, query))
    return np.where(rows.layouts.zero_stage >= 1, rows.dense_layers * wasted, 0.0)


def _checkpointed_share(techniques: Techniques, rows: RankColumns) -> FloatColumn | float:
    """Return the share of layer inputs that are saved: uniform full recompute saves one for each group of layers."""
    count = rows.layouts.recompute_layers
    if techniques.recompute_method != "uniform" or not np.any(count):
        return 1.0
    return np.where(rows.layouts.recompute == RECOMPUTE_FULL, 1.0 / np.maximum(count, 1), 1.0)


def _block(job: Job, rows: RankColumns, depth: FloatColumn) -> FloatColumn | float:
    """Return what the layers that block recompute leaves whole save beyond their inputs."""
    count = rows.layouts.recompute_layers
    if job.techniques.recompute_method != "block" or not np.any(count):
        return 0.0
    layers = rows.dense_layers + rows.moe_layers
    chunks = rows.layouts.virtual_pipeline  # the count is of each model chunk
    whole = np.maximum(layers - count * chunks, 0.0)
    mixture = np.divide(rows.moe_layers, layers, out=np.zeros(len(rows)), where=layers > 0)
    dense = saved_by_dense_layer(job, rows).total
    more = (1.0 - mixture) * dense - layer_input(job, rows)
    if job.shape.moe is not None:
        more = more + mixture * saved_by_mixture_layer(job, rows).total
    return np.where((rows.layouts.recompute == RECOMPUTE_FULL) & (count > 0), whole * depth * more, 0.0)


def kept_embedding(job: Job, rows: RankColumns) -> FloatColumn:
    """Return for the first rank int64 token ids, their labels, positions and loss mask; what the embedding's norm and
    dropout keep, where it has them; and the cosines and sines that all layers read, where they are not made inside a
    kernel."""
    mask = float(job.shape.hidden_size) if job.shape.hidden_dropout > 0 else 0.0
    norm = job.facts.activation_bytes * job.shape.hidden_size if job.facts.embedding_norm else 0.0
    turns = job.facts.rotary_bytes * job.shape.head_dim if job.shape.position_embedding == "rope" else 0.0
    embedding = tokens(job, rows) * (32.0 + turns + (mask + norm) / sequence_split(job, rows))
    return np.where(rows.first, embedding * in_flight(job, rows).depth, 0.0)


def returned_key_values(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the keys and values of every layer where the model returns them, recomputed or not."""
    of_kinds = [np.maximum(kind.shape.num_query_groups, rows.tensor) * kind.shape.head_dim for kind in job.by_attention]
    groups = mean_of_kinds(rows, of_kinds) / rows.tensor
    width = 2.0 * job.facts.activation_bytes * groups * job.facts.key_values_returned
    return np.asarray((rows.dense_layers + rows.moe_layers) * tokens(job, rows) * width)
