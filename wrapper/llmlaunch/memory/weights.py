"""Parameters each pipeline rank holds on one device, dense and expert kept apart (they are sharded differently).

Counts follow Megatron core 0.19: attention and MLP matrices are split over tensor parallelism, experts over expert
and expert-tensor parallelism, norms and routers are whole on every device, and tied embeddings exist a second time
on the last of several stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.memory.adapters import fused_parameters
from llmlaunch.memory.compressed import narrow_weights
from llmlaunch.memory.heads import final_norm_rank, head_layers, head_rank
from llmlaunch.memory.job import (
    Job,
    RankColumns,
    alike_parts,
    chunk_ranges,
    mean_of_kinds,
    mean_of_parts,
    once_for_rows,
)
from llmlaunch.memory.layer_matrices import distinct_elements, largest_matrices
from llmlaunch.memory.vision import encoder_matrices, rank_encoder
from llmlaunch.models.kinds import part_kinds
from llmlaunch.models.mamba import CONV_KERNEL, Mamba
from llmlaunch.models.parameters import (
    compressed_attention,
    indexer_parameters,
    stream_contraction,
    stream_mixing,
)
from llmlaunch.models.shape import LinearAttention, ModelShape

__all__ = [
    "Matrices",
    "RankParameters",
    "adapter_parameters",
    "distinct_matrices",
    "largest_parameter",
    "layer_parameters",
    "linear_weights",
    "matrices",
    "rank_parameters",
    "tables",
    "trained_layers",
    "trained_parameters",
]


@frozen
class RankParameters:
    """Parameter counts on one device. `largest_layer` is what ZeRO 3 must gather at once."""

    dense: FloatColumn
    expert: FloatColumn
    largest_layer: FloatColumn


@once_for_rows
def vocabulary(job: Job, rows: RankColumns) -> FloatColumn:
    """Rows of the embedding table, padded as the backend pads them, before the division by tensor."""
    if not job.facts.pad_vocabulary:
        return np.full(len(rows), float(job.shape.vocab_size))
    multiple = 128.0 * rows.tensor
    return np.ceil(job.shape.vocab_size / multiple) * multiple


def _attention(shape: ModelShape, tensor: FloatColumn) -> FloatColumn:
    h = shape.hidden_size
    if shape.mla is not None:
        return _latent_attention(shape, tensor)
    if shape.compressed_attention is not None:  # which tensor parallelism does not split
        return np.full(len(tensor), float(compressed_attention(shape, shape.compressed_attention)))
    # fewer key/value groups than tensor ranks: every rank still holds one (transformer_config.py, core 0.19)
    groups = np.maximum(shape.num_query_groups / tensor, 1.0)
    key_value = float(shape.projected_groups) * groups * shape.head_dim
    query = shape.query_width / tensor
    gate = query if shape.attention_gate else 0.0
    count = h * (query + gate + key_value) + query * h
    if shape.linear_bias or shape.qkv_bias:
        count = count + query + gate + key_value
    if shape.linear_bias:
        count = count + h
    if shape.qk_layernorm:
        count = count + (query + groups * shape.head_dim if shape.qk_norm_of_all_heads else 2.0 * shape.head_dim)
    if shape.attention_sinks:
        count = count + shape.num_attention_heads / tensor
    return count


def _latent_attention(shape: ModelShape, tensor: FloatColumn) -> FloatColumn:
    """Down projections and an indexer are whole on every device, up projections split (multi_latent_attention.py and
    experimental_attention_variant/dsa.py, core 0.19)."""
    mla = shape.mla
    assert mla is not None
    h, heads = shape.hidden_size, shape.num_attention_heads
    query_head = mla.qk_head_dim + mla.qk_pos_emb_head_dim
    if mla.q_lora_rank:
        whole = h * mla.q_lora_rank + mla.q_lora_rank
        split = mla.q_lora_rank * heads * query_head
    else:
        whole, split = 0, h * heads * query_head
    whole += h * (mla.kv_lora_rank + mla.qk_pos_emb_head_dim) + mla.kv_lora_rank
    split += mla.kv_lora_rank * heads * (mla.qk_head_dim + mla.v_head_dim) + heads * mla.v_head_dim * h
    return whole + indexer_parameters(shape) + split / tensor


def _linear_attention(linear: LinearAttention, hidden: int, tensor: FloatColumn) -> FloatColumn:
    """All but the norm over a head is split (core/ssm/gated_delta_net/common.py, core 0.19)."""
    convolution = linear.conv_kernel * linear.convolved_width + 2 * linear.num_value_heads
    return _linear_projections(linear, hidden, tensor) + convolution / tensor + linear.value_head_dim


def _linear_projections(linear: LinearAttention, hidden: int, tensor: FloatColumn) -> FloatColumn:
    return hidden * (linear.projected_width + linear.value_width) / tensor


def _mamba(mamba: Mamba, hidden: int, tensor: FloatColumn) -> FloatColumn:
    """Heads and groups are split, and all that is theirs (core/ssm/mamba_mixer.py, core 0.19)."""
    columns = (CONV_KERNEL + 1) * mamba.convolved_width + 3 * mamba.num_heads + mamba.inner_width
    return _mamba_projections(mamba, hidden, tensor) + columns / tensor


def _mamba_projections(mamba: Mamba, hidden: int, tensor: FloatColumn) -> FloatColumn:
    return hidden * (mamba.projected_width + mamba.inner_width) / tensor


def _of_parts(shape: ModelShape, **columns: Callable[[], FloatColumn]) -> dict[str, FloatColumn]:
    """Return the columns of the parts that layers of the model have."""
    return {kind: columns[kind]() for kind in part_kinds(shape)}


def _norms(shape: ModelShape) -> float:
    return shape.hidden_size * (2.0 if shape.normalization == "LayerNorm" else 1.0)


def _query_norms(job: Job) -> int:
    """A norm as wide as the residual stream before queries that have no latent, where a backend has one."""
    mla = job.shape.mla
    return int(job.facts.query_input_normed and mla is not None and mla.q_lora_rank is None)


def _mlp(shape: ModelShape, width: float, tensor: FloatColumn, outer: int | None = None) -> FloatColumn:
    outer = shape.hidden_size if outer is None else outer
    count = outer * width * (3.0 if shape.gated_mlp else 2.0) / tensor
    if shape.linear_bias:
        count = count + width * (2.0 if shape.gated_mlp else 1.0) / tensor + outer
    return count


@once_for_rows
def layer_parameters(job: Job, rows: RankColumns) -> tuple[FloatColumn, FloatColumn, FloatColumn]:
    """(dense layer, dense part of a mixture layer, expert part of a mixture layer), per device."""
    shape, lay = job.shape, rows.layouts
    tensor, hidden, alone = rows.tensor, shape.hidden_size, shape.mamba is not None
    linear, mamba = shape.linear_attention, shape.mamba
    norms = (shape.norms_per_layer + _query_norms(job)) * _norms(shape) + 2.0 * stream_mixing(shape)
    mixers = _of_parts(
        shape,
        attention=lambda: mean_of_kinds(rows, [_attention(alike.shape, tensor) for alike in job.by_attention]),
        linear=lambda: np.zeros(len(rows)) if linear is None else _linear_attention(linear, hidden, tensor),
        mamba=lambda: np.zeros(len(rows)) if mamba is None else _mamba(mamba, hidden, tensor),
        mlp=lambda: _mlp(shape, shape.ffn_hidden_size, tensor),
    )
    common = mean_of_parts(rows, mixers)
    dense = common + norms if alone else common + norms + _mlp(shape, shape.ffn_hidden_size, tensor)
    if shape.moe is None:
        return dense, np.zeros(len(rows)), np.zeros(len(rows))
    moe = shape.moe
    shared = (norms if alone else common + norms) + hidden * (moe.num_experts + float(moe.shared_expert_gate))
    if shape.linear_bias:
        shared = shared + moe.num_experts
    if moe.latent_size is not None:
        shared = shared + 2.0 * hidden * moe.latent_size  # whole on every device (core/transformer/moe/moe_layer.py)
    if moe.shared_expert_ffn_hidden_size:
        shared = shared + _mlp(shape, moe.shared_expert_ffn_hidden_size, tensor)
    expert = _mlp(shape, moe.ffn_hidden_size, lay.expert_tensor.astype(np.float64), shape.expert_width)
    return dense, np.broadcast_to(shared, len(rows)), moe.num_experts / lay.expert * expert


@once_for_rows
def tables(job: Job, rows: RankColumns) -> tuple[FloatColumn, FloatColumn]:
    """Return the elements of the embedding table and of the head on one device."""
    whole = vocabulary(job, rows) * job.shape.hidden_size
    split = whole / rows.tensor
    embedding = whole if job.facts.embedding_whole else split
    return embedding, embedding if job.shape.tied_embeddings else split


@once_for_rows
def rank_parameters(job: Job, rows: RankColumns) -> RankParameters:
    """Return the parameters on one device of each row's pipeline rank."""
    shape, lay = job.shape, rows.layouts
    dense_layer, moe_layer, experts = layer_parameters(job, rows)
    embedding, head = tables(job, rows)
    dense = rows.dense_layers * dense_layer + rows.moe_layers * moe_layer
    expert = rows.moe_layers * experts
    first = embedding + (shape.max_position_embeddings * shape.hidden_size if _learned(shape) else 0.0)
    second_table = np.where(lay.pipeline > 1, head, 0.0) if shape.tied_embeddings else head
    norm = np.equal(rows.rank, final_norm_rank(job, lay)) * (_norms(shape) + stream_contraction(shape))
    if shape.mtp_num_layers:
        heads, (extra, extra_experts) = np.equal(rows.rank, head_rank(job, lay)), _mtp(job, rows)
        apart = job.techniques.heads_before_loss or not shape.tied_embeddings
        dense = dense + heads * (extra + np.where((lay.pipeline > 1) & apart, first, 0.0))
        expert = expert + heads * extra_experts
    dense = dense + rows.first * first + rows.last * second_table + norm + rank_encoder(job, rows)
    return RankParameters(dense, expert, np.maximum(_largest_layer(job, rows), embedding))


def _largest_layer(job: Job, rows: RankColumns) -> FloatColumn:
    layers = (layer_parameters(job, alike) for alike in alike_parts(job, rows))
    return reduce(np.maximum, (np.maximum(dense, mixture + experts) for dense, mixture, experts in layers))


def _learned(shape: ModelShape) -> bool:
    return shape.position_embedding.startswith("learned_absolute")


def _mtp(job: Job, rows: RankColumns) -> tuple[FloatColumn, FloatColumn]:
    """Multi-token-prediction modules: their layers, a 2h x h projection, three norms
    (megatron/core/transformer/multi_token_prediction.py, core 0.19). They embed tokens, so that their one of several
    stages has a table of its own (models/gpt/gpt_model.py GPTModel.__init__), unless the head's is one already."""
    shape, layers = job.shape, head_layers(job, rows)
    dense, mixture, experts = layer_parameters(job, layers.rows)
    projection = 2.0 * shape.hidden_size**2 / rows.layouts.tensor
    around = projection + 3.0 * _norms(shape) + stream_contraction(shape)
    module = layers.dense * dense + layers.mixture * mixture + around
    return shape.mtp_modules * module, shape.mtp_modules * layers.mixture * experts


@frozen
class Matrices:
    """Elements of weight matrices on one device. `dense` and `expert` are (first linear, second linear) of one layer's
    MLP, all its experts together."""

    dense: tuple[FloatColumn, FloatColumn]
    expert: tuple[FloatColumn, FloatColumn]
    head: FloatColumn  # last rank only


@once_for_rows
def matrices(job: Job, rows: RankColumns) -> Matrices:
    """Return the matrices whose gradients are computed one after the other."""
    shape, lay = job.shape, rows.layouts
    tensor = rows.tensor
    gates = 2.0 if shape.gated_mlp else 1.0
    second = shape.hidden_size * shape.ffn_hidden_size / tensor
    head = np.where(rows.last, tables(job, rows)[1], 0.0)
    if shape.moe is None:
        none = np.zeros(len(rows))
        return Matrices((gates * second, second), (none, none), head)
    expert_matrix = shape.expert_width * shape.moe.ffn_hidden_size / lay.expert_tensor
    local = shape.moe.num_experts / lay.expert
    return Matrices((gates * second, second), (gates * local * expert_matrix, local * expert_matrix), head)


def distinct_matrices(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the elements of the weight matrices whose shapes differ, each once, and of the head."""
    return distinct_elements(job, rows) + matrices(job, rows).head + encoder_matrices(job, rows)


@once_for_rows
def largest_parameter(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the elements of the largest single parameter that a device has, the embedding and the head included; the
    experts of a device count as one."""
    (dense, experts), (embedding, head) = largest_matrices(job, rows), tables(job, rows)
    table = np.where(rows.first, embedding, np.where(rows.last, head, 0.0))
    if job.techniques.heads_before_loss:
        table = np.where(np.equal(rows.rank, head_rank(job, rows.layouts)), embedding, table)
    return np.maximum(np.maximum(dense, experts), table)


def _attention_matrices(shape: ModelShape, tensor: FloatColumn) -> FloatColumn:
    """Return the elements of one layer's attention matrices on a device, without biases and norms."""
    if shape.mla is not None:
        return _latent_attention(shape, tensor)
    if shape.compressed_attention is not None:
        return np.full(len(tensor), narrow_weights(shape, shape.compressed_attention))
    groups = np.maximum(shape.num_query_groups / tensor, 1.0)
    queries = 3.0 if shape.attention_gate else 2.0
    return shape.hidden_size * (
        queries * shape.query_width / tensor + float(shape.projected_groups) * groups * shape.head_dim
    )


@once_for_rows
def linear_weights(job: Job, rows: RankColumns) -> tuple[FloatColumn, FloatColumn]:
    """Return the (dense, expert) weights of the blocks' linear layers on one device: what a narrower number format is
    applied to (not the embedding, the head and the router)."""
    shape, lay = job.shape, rows.layouts
    tensor = rows.tensor
    gates, linear, mamba = 3.0 if shape.gated_mlp else 2.0, shape.linear_attention, shape.mamba
    mlp, none, alone = (
        gates * shape.hidden_size * shape.ffn_hidden_size / tensor,
        np.zeros(len(rows)),
        mamba is not None,
    )
    mixers = _of_parts(
        shape,
        attention=lambda: mean_of_kinds(rows, [_attention_matrices(alike.shape, tensor) for alike in job.by_attention]),
        linear=lambda: none if linear is None else _linear_projections(linear, shape.hidden_size, tensor),
        mamba=lambda: none if mamba is None else _mamba_projections(mamba, shape.hidden_size, tensor),
        mlp=lambda: mlp,
    )
    mixer = mean_of_parts(rows, mixers)
    dense = rows.dense_layers * (mixer if alone else mixer + mlp)
    if shape.moe is None:
        return dense, np.zeros(len(rows))
    moe = shape.moe
    experts = moe.num_experts / lay.expert * shape.expert_width * moe.ffn_hidden_size / lay.expert_tensor
    shared = gates * shape.hidden_size * moe.shared_expert_ffn_hidden_size / tensor + (0.0 if alone else mixer)
    shared = shared + (0.0 if moe.latent_size is None else 2.0 * shape.hidden_size * moe.latent_size)
    return dense + rows.moe_layers * shared, rows.moe_layers * gates * experts


def trained_layers(job: Job, rows: RankColumns) -> tuple[FloatColumn, FloatColumn]:
    """Dense and mixture layers of each row's rank that are trained (SHERL, Diao et al. 2024: late layers alone)."""
    last = job.techniques.trained_layers
    if last is None:
        return rows.dense_layers, rows.moe_layers
    shape = job.shape
    pattern = shape.moe.layer_pattern if shape.moe else (0,) * shape.num_layers
    before = np.concatenate([[0], np.cumsum(pattern)])  # mixture layers before layer i
    layers, mixture = np.zeros(len(rows)), np.zeros(len(rows))
    for start, stop in chunk_ranges(shape, rows.layouts, rows.rank):
        first = np.clip(shape.num_layers - last, start, stop)
        layers += stop - first
        mixture += before[stop] - before[first]
    return layers - mixture, mixture


def trained_parameters(job: Job, rows: RankColumns, counts: RankParameters) -> RankParameters:
    """Parameters with a gradient and optimizer states, of all on the device."""
    techniques = job.techniques
    if techniques.adapters is not None:
        dense, expert = adapter_parameters(job, rows, frozen=techniques.adapters.frozen_down)
        return replace(counts, dense=dense, expert=expert)
    if techniques.trained_layers is None:
        if job.shape.vision is None:
            return counts
        frozen = rank_encoder(job, rows) - rank_encoder(job, rows, trained=True)
        return replace(counts, dense=counts.dense - frozen)
    dense_layers, moe_layers = trained_layers(job, rows)
    dense, mixture, experts = layer_parameters(job, rows)
    head = tables(job, rows)[1] + job.shape.hidden_size
    trained = dense_layers * dense + moe_layers * mixture + np.where(rows.last, head, 0.0)
    return replace(counts, dense=np.minimum(trained, counts.dense), expert=moe_layers * experts)


def adapter_parameters(job: Job, rows: RankColumns, frozen: bool = False) -> tuple[FloatColumn, FloatColumn]:
    """(dense, expert) parameters of the adapters on a device: rank x (inputs + outputs) of every linear layer of the
    blocks that has one (LoRA, Hu et al. 2021, section 4.2). `frozen` leaves out the first matrices (LoRA-FA, Zhang et
    al. 2023).

    Tensor parallelism splits one side of each pair, the one its linear layer is split on; of `adapters_fused` both.
    """
    adapters = job.techniques.adapters
    if adapters is None:
        return np.zeros(len(rows)), np.zeros(len(rows))
    shape, lay = job.shape, rows.layouts
    if job.facts.adapters_fused:
        return fused_parameters(job, rows)
    t, h, targets = rows.tensor, float(shape.hidden_size), adapters.targets
    projections = float("up_proj" in targets) + float(shape.gated_mlp and "gate_proj" in targets)

    def mlp(width: float, split: FloatColumn) -> FloatColumn:
        first = projections * ((0.0 if frozen else h) + width / split)
        second = (0.0 if frozen else width / split) + h
        return first + second if "down_proj" in targets else first

    attention, linear = _attention_pairs(shape, targets, t, frozen), shape.linear_attention
    if linear is not None and "o_proj" in targets:  # all of attention's, or none
        each = _of_parts(shape, attention=lambda: attention, linear=lambda: _delta_pairs(linear, h, t, frozen))
        attention = mean_of_parts(rows, each)
    if shape.moe is None:
        return adapters.rank * rows.dense_layers * (attention + mlp(shape.ffn_hidden_size, t)), np.zeros(len(rows))
    moe = shape.moe
    shared = mlp(moe.shared_expert_ffn_hidden_size, t) if moe.shared_expert_ffn_hidden_size else 0.0
    dense = rows.dense_layers * (attention + mlp(shape.ffn_hidden_size, t)) + rows.moe_layers * (attention + shared)
    experts = moe.num_experts / lay.expert * mlp(moe.ffn_hidden_size, lay.expert_tensor.astype(np.float64))
    return adapters.rank * dense, adapters.rank * rows.moe_layers * experts


def _delta_pairs(linear: LinearAttention, h: float, t: FloatColumn, frozen: bool) -> FloatColumn:
    """The same of one gated delta net."""
    inputs = 0.0 if frozen else h + linear.value_width / t
    return linear.projected_width / t + h + inputs


def _attention_pairs(shape: ModelShape, targets: frozenset[str], t: FloatColumn, frozen: bool) -> FloatColumn:
    """Inputs and outputs of the linear layers of one attention block that have an adapter, summed. Latent attention has
    other layers: all of them have one, or none."""
    h = float(shape.hidden_size)
    if shape.mla is None:
        groups, query = np.maximum(shape.num_query_groups / t, 1.0) * shape.head_dim, shape.query_width / t
        inputs = 0.0 if frozen else h
        sides = {
            "q_proj": inputs + (1.0 + shape.attention_gate) * query,
            "k_proj": inputs + groups,
            "v_proj": inputs + groups,
            "o_proj": h + (0.0 if frozen else query),
        }
        return reduce(np.add, (sides[name] for name in sides if name in targets), np.zeros(len(t)))
    if "o_proj" not in targets:
        return np.zeros(len(t))
    mla, heads = shape.mla, shape.num_attention_heads
    width, latent = heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim), mla.q_lora_rank or 0
    columns = width / t + latent + mla.kv_lora_rank + mla.qk_pos_emb_head_dim
    columns = columns + heads * (mla.qk_head_dim + mla.v_head_dim) / t
    inputs = 2.0 * h + latent + mla.kv_lora_rank
    last = heads * mla.v_head_dim / t
    return columns + h + (0.0 if frozen else inputs + last)
