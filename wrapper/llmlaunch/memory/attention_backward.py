"""What attention, or what a layer has in its place, makes while it runs backward."""

from __future__ import annotations

from functools import reduce

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.layout import RECOMPUTE_SELECTIVE
from llmlaunch.memory.activations import RECOMPUTED, kept_by_layer, layer_input
from llmlaunch.memory.compressed import attention_backward as pooled_backward
from llmlaunch.memory.job import Job, RankColumns, alike_parts, chunk_ranges, recomputes
from llmlaunch.memory.recurrent import delta_net_alive, mamba_alive
from llmlaunch.memory.saved import (
    key_value_heads,
    padded_heads,
    saved_by_dense_layer,
    saved_by_mixture_layer,
    tokens,
)
from llmlaunch.models.kinds import layer_parts

__all__ = ["attention_backward"]

FP32_BYTES = 4.0


def attention_backward(job: Job, rows: RankColumns) -> FloatColumn | float:
    """Return what attention's backward pass makes beside the saved tensors, less what the layer's MLP saved, which is
    freed by then."""
    if job.shape.indexer is not None:
        return np.asarray(_sparse_backward(job, rows) - _saved_by_mlp(job, rows))
    if job.shape.compressed_attention is not None:
        return np.asarray(_compressed_backward(job, rows) - _saved_by_mlp(job, rows))
    if job.shape.linear_attention is not None or job.shape.mamba is not None:
        mixer = _delta_net_backward(job, rows) if job.shape.mamba is None else _mamba_backward(job, rows)
        return np.maximum(mixer, _softmax_among_others(job, rows))
    return np.asarray(_softmax_backward(job, rows) - _saved_by_mlp(job, rows))


def _softmax_among_others(job: Job, rows: RankColumns) -> FloatColumn | float:
    """Return the same of the layers with softmax attention, where others have another mixer in its place. A layer of
    one part has no MLP that ran backward before it: the rank's last layer has."""
    alike, share = _with_part(job, rows, "attention")
    if alike is None:
        return 0.0
    behind = _saved_by_mlp(job, alike) if job.shape.mamba is None else _behind(job, rows, "attention")
    return np.where(share > 0, _softmax_backward(job, alike) - behind, 0.0)


def _softmax_backward(job: Job, rows: RankColumns) -> FloatColumn:
    """Return what softmax attention makes while it runs backward: with scores in memory their gradients, else what a
    fused kernel makes of the kind of attention that makes most."""
    if job.facts.attention_scores_saved:
        scores = job.shape.num_attention_heads / rows.tensor * tokens(job, rows) * job.workload.sequence_length
        return np.asarray(job.facts.score_gradient_bytes * scores)
    of_kinds = [_fused_backward(alike, rows) for alike in job.by_attention]
    return reduce(np.minimum if rows.kind_shares is None else np.maximum, of_kinds)


def _fused_backward(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes that fused attention makes while it runs backward, less what the projection behind it has let
    go of by then.

    The gradient of the output comes in; those of queries, keys and values go out. Queries' is summed in fp32, and where
    several query heads share a head of keys, keys and values first get a gradient for every query head (mha_bwd of
    flash-attn 2.8, csrc/flash_attn/flash_api.cpp, and of torch 2.13, cuda/flash_attn/flash_api.cpp; the workspace of
    cuDNN's sdpa_backward, `dQ_accum`, `dK_fullhead` and `dV_fullhead`, cudnn-frontend 1.14). With a mask as a tensor
    all three are summed in fp32 (cuda/mem_eff_attention/kernel_backward.h workspace_size, torch 2.13). In fp32 nothing
    is summed apart."""
    shape, facts, mla = job.shape, job.facts, job.shape.mla
    e, n, t = facts.activation_bytes, tokens(job, rows), rows.tensor
    heads = float(shape.num_attention_heads)
    query, value = float(shape.head_dim), float(shape.head_dim)
    keys = key_value_heads(job, rows)
    if mla is not None:
        query, value = float(mla.qk_head_dim + mla.qk_pos_emb_head_dim), float(mla.v_head_dim)
        keys = np.full(len(rows), heads)
    summed = 0.0 if e >= FP32_BYTES else FP32_BYTES
    made = e * (heads * (value + query) + keys * (query + value)) + summed * heads * query
    if facts.windows_masked:
        made = made + summed * keys * (query + value)
    else:
        made = made + np.where(keys < heads, e * heads * (query + value), 0.0)
    gone = saved_by_dense_layer(job, rows).of("attn_proj_input")
    output = layer_input(job, rows) if facts.branch_gradients_apart else 0.0
    return np.asarray(n * made / t - gone - output)


def _sparse_backward(job: Job, rows: RankColumns) -> FloatColumn:
    """Rows without keys are left out, so queries, outputs and gradients are copied twice: one row is added, and rows
    are selected; then there is the queries' gradient, and that of what attention put out
    (experimental_attention_variant/dsa_cudnn_kernels.py _run_sparse_attention_backward, core 0.19; traced). The input
    of the projection behind it is freed."""
    shape, mla = job.shape, job.shape.mla
    assert mla is not None
    heads, latent = shape.num_attention_heads / rows.tensor, mla.kv_lora_rank
    copied = padded_heads(job, rows) * (3.0 * (latent + mla.qk_pos_emb_head_dim) + 4.0 * latent)
    return tokens(job, rows) * job.facts.activation_bytes * (copied + heads * (latent - mla.v_head_dim))


def _compressed_backward(job: Job, rows: RankColumns) -> FloatColumn:
    """Return what the backward pass of attention to pooled keys makes, at most of the kinds that a rank has."""
    queries = recomputes(job, rows.layouts, "mla_up_proj") & (rows.layouts.recompute == RECOMPUTE_SELECTIVE)
    again = np.where(queries, saved_by_dense_layer(job, rows).of("attn_qkv"), 0.0)
    of_kinds = [pooled_backward(alike, tokens(job, rows), again) for alike in job.by_attention]
    return reduce(np.minimum if rows.kind_shares is None else np.maximum, of_kinds)


def _delta_net_backward(job: Job, rows: RankColumns) -> FloatColumn | float:
    """Return what a gated delta net has alive while it runs backward, less what the MLP and the norm behind the
    recurrence saved, which is freed by then."""
    linear = job.shape.linear_attention
    alike, share = _with_part(job, rows, "linear")
    if linear is None or alike is None:
        return 0.0
    behind = saved_by_dense_layer(job, alike).of("delta_output", "delta_proj_input")
    alive = delta_net_alive(job, rows, linear, tokens(job, rows))
    return np.where(share > 0, alive - behind - _saved_by_mlp(job, alike), 0.0)


def _mamba_backward(job: Job, rows: RankColumns) -> FloatColumn | float:
    """Return what a Mamba-2 mixer has alive while it runs backward, less what the norm behind the scan, the last
    projection and the layer behind it saved. The gradient of its output is gone by then, and the residual stream's is
    the only one as wide."""
    mamba = job.shape.mamba
    alike, share = _with_part(job, rows, "mamba")
    if mamba is None or alike is None:
        return 0.0
    own = saved_by_dense_layer(job, alike)
    scan = own.of("mamba_scan") / 2.0 + own.of("mamba_statistics", "mamba_proj_input")
    output = layer_input(job, rows) if job.facts.branch_gradients_apart else 0.0
    alive = mamba_alive(job, rows, mamba, tokens(job, rows)) - scan - output
    return np.where(share > 0, alive - _behind(job, rows, "mamba"), 0.0)


RowsAndShare = tuple[RankColumns | None, FloatColumn]


def _with_part(job: Job, rows: RankColumns, part: str) -> RowsAndShare:
    """Return the rows as if all layers had `part` where any has, and its share; None where the model has no such
    layer, or the shares are not known."""
    if rows.shares is None or part not in rows.shares:
        return None, np.zeros(len(rows))
    return alike_parts(job, rows)[tuple(rows.shares).index(part)], rows.shares[part]


def _behind(job: Job, rows: RankColumns, part: str) -> FloatColumn:
    """Return what a rank's last layer keeps, where it is another part than this: it has run backward before any of
    these."""
    parts, stops = layer_parts(job.shape), [stop for _, stop in chunk_ranges(job.shape, rows.layouts, rows.rank)]
    last, behind = np.maximum(reduce(np.maximum, stops), 1) - 1, np.zeros(len(rows))
    for kind in dict.fromkeys(parts):
        alike = rows if kind == "mixture" else _with_part(job, rows, kind)[0]
        if kind != part and alike is not None:
            is_last = np.array([each == kind for each in parts])[last]
            behind = np.where(is_last, kept_by_layer(job, alike)[int(kind == "mixture")], behind)
    return behind


def _saved_by_mlp(job: Job, rows: RankColumns) -> FloatColumn:
    """Return what a layer's MLP, the norm before it and those behind both blocks save: the least of the kinds of layers
    that the rank has."""
    norm = ("mlp_norm_input", "mlp_norm_output", "mlp_post_norm_input", "attn_post_norm_input")
    freed = saved_by_dense_layer(job, rows).of(*norm, *RECOMPUTED["mlp"])
    if job.shape.moe is not None:
        mixture = saved_by_mixture_layer(job, rows).of(*norm, *RECOMPUTED["moe"])
        freed = np.minimum(
            np.where(rows.dense_layers > 0, freed, np.inf), np.where(rows.moe_layers > 0, mixture, np.inf)
        )
        freed = np.where(np.isfinite(freed), freed, 0.0)
    return freed
