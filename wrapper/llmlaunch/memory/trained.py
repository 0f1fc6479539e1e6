"""What is trained where not all of a model is: adapters beside frozen layers, or the last layers alone.

Frozen parameters have no gradient and no optimizer states; frozen first layers keep nothing for a backward pass that
never reaches them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.memory.job import Job, RankColumns, chunk_ranges
from llmlaunch.memory.weights import RankParameters, layer_parameters, tables

__all__ = ["adapter_parameters", "trained_layers", "trained_parameters"]


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
    ways = job.techniques
    if ways.adapters is not None:
        dense, expert = adapter_parameters(job, rows, frozen=ways.adapters.frozen_down)
        return replace(counts, dense=dense, expert=expert)
    if ways.trained_layers is None:
        return counts
    dense_layers, moe_layers = trained_layers(job, rows)
    dense, mixture, experts = layer_parameters(job, rows)
    head = tables(job, rows)[1] + job.shape.hidden_size
    trained = dense_layers * dense + moe_layers * mixture + np.where(rows.last, head, 0.0)
    return replace(counts, dense=np.minimum(trained, counts.dense), expert=moe_layers * experts)


def adapter_parameters(job: Job, rows: RankColumns, frozen: bool = False) -> tuple[FloatColumn, FloatColumn]:
    """(dense, expert) parameters of the adapters on a device: rank x (inputs + outputs) of every linear layer of the
    blocks (LoRA, Hu et al. 2021, section 4.2). `frozen` leaves out the first matrices (LoRA-FA, Zhang et al. 2023).

    Tensor parallelism splits one side of each pair, the one its linear layer is split on.
    """
    adapters = job.techniques.adapters
    if adapters is None:
        return np.zeros(len(rows)), np.zeros(len(rows))
    shape, lay = job.shape, rows.layouts
    t, h = rows.tensor, float(shape.hidden_size)
    projections = 2.0 if shape.gated_mlp else 1.0

    def mlp(width: float, split: FloatColumn) -> FloatColumn:
        first = projections * ((0.0 if frozen else h) + width / split)
        return first + (0.0 if frozen else width / split) + h

    attention = _attention_pairs(job, t, frozen)
    if shape.moe is None:
        return adapters.rank * rows.dense_layers * (attention + mlp(shape.ffn_hidden_size, t)), np.zeros(len(rows))
    moe = shape.moe
    shared = mlp(moe.shared_expert_ffn_hidden_size, t) if moe.shared_expert_ffn_hidden_size else 0.0
    dense = rows.dense_layers * (attention + mlp(shape.ffn_hidden_size, t)) + rows.moe_layers * (attention + shared)
    experts = moe.num_experts / lay.expert * mlp(moe.ffn_hidden_size, lay.expert_tensor.astype(np.float64))
    return adapters.rank * dense, adapters.rank * rows.moe_layers * experts


def _attention_pairs(job: Job, t: FloatColumn, frozen: bool) -> FloatColumn:
    """Inputs and outputs of the linear layers of one attention block, summed."""
    shape = job.shape
    h = float(shape.hidden_size)
    if shape.mla is None:
        groups = np.maximum(shape.num_query_groups / t, 1.0) * shape.head_dim
        columns, inputs = shape.query_width / t + 2.0 * groups, 3.0 * h
        last = shape.query_width / t
    else:
        mla, heads = shape.mla, shape.num_attention_heads
        query, latent = heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim), mla.q_lora_rank or 0
        columns = query / t + latent + mla.kv_lora_rank + mla.qk_pos_emb_head_dim
        columns = columns + heads * (mla.qk_head_dim + mla.v_head_dim) / t
        inputs = 2.0 * h + latent + mla.kv_lora_rank
        last = heads * mla.v_head_dim / t
    return columns + h + (0.0 if frozen else inputs + last)
