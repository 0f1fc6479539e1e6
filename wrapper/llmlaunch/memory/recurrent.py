"""What recurrent mixers keep for their backward pass and have alive while they run backward, for one micro-batch:
gated delta nets and Mamba-2 mixers.

Kernels make most of the forward pass again: convolutions, the states between chunks of tokens, the products within
a chunk. Norms before the mixers are counted with those of other layers (`saved`).
"""

from __future__ import annotations

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.models.mamba import Mamba
from llmlaunch.models.shape import LinearAttention

__all__ = ["DELTA_CHUNK", "MAMBA_CHUNK", "delta_net_alive", "mamba_alive", "saved_by_delta_net", "saved_by_mamba"]

FP32_BYTES = 4.0
DELTA_CHUNK = 64.0  # tokens over which flash-linear-attention solves a triangular system at a time
MAMBA_CHUNK = 128.0  # tokens of a chunk of the scan (core/ssm/mamba_mixer.py, core 0.19)


def saved_by_delta_net(
    job: Job, rows: RankColumns, linear: LinearAttention, tokens: FloatColumn
) -> dict[str, FloatColumn]:
    """One gated delta net: what the convolution reads, normed queries and keys, these once for every value head,
    values, the inverse of each chunk's triangular system, and what the norm of the output and its gate keep: both
    factors, and the gate and its activation in fp32. A decay and a rate of each head come in fp32, the rate's sigmoid
    not (megatron/core/ssm/gated_delta_net, core 0.19; fla/ops/gated_delta_rule/chunk.py, modules/convolution.py and
    l2norm.py, flash-linear-attention 0.4)."""
    e, n = job.facts.activation_bytes, tokens / rows.tensor
    heads, values = linear.num_value_heads, linear.value_width
    expanded = heads // linear.num_key_heads > 1
    queries = 2.0 * linear.key_head_dim * heads + 2.0 * linear.key_width * expanded
    return {
        "delta_convolution": n * e * linear.convolved_width,
        "delta_heads": n * (e * (queries + values) + 2.0 * FP32_BYTES * linear.num_key_heads),
        "delta_rates": n * heads * (3.0 * FP32_BYTES + e),
        "delta_chunks": n * e * DELTA_CHUNK * heads,
        "delta_output": n * (2.0 * (e + FP32_BYTES) * values + FP32_BYTES * heads),
        "delta_proj_input": n * job.facts.linear_input_bytes * values,
    }


def delta_net_alive(job: Job, rows: RankColumns, linear: LinearAttention, tokens: FloatColumn) -> FloatColumn:
    """Return what the recurrence of a gated delta net has alive while it runs backward: per element of all heads'
    queries five tensors, per element of their values five and the gate's gradient, and twice the states between chunks
    (fla/ops/gated_delta_rule/chunk.py chunk_gated_delta_rule_bwd, flash-linear-attention 0.4)."""
    queries = float(linear.num_value_heads * linear.key_head_dim)
    states = queries * linear.value_head_dim / DELTA_CHUNK
    elements = 5.0 * queries + 6.0 * linear.value_width + 2.0 * states
    return tokens * job.facts.activation_bytes * elements / rows.tensor


def _groups(mamba: Mamba, rows: RankColumns) -> FloatColumn:
    """Return the groups of heads on a device, in a sequence that context parallelism divides as it divides them: over
    more context ranks than a tensor rank has groups, each is there several times (core/ssm/mamba_context_parallel.py,
    core 0.19)."""
    return np.maximum(mamba.groups / rows.tensor, rows.layouts.context)


def saved_by_mamba(job: Job, rows: RankColumns, mamba: Mamba, tokens: FloatColumn) -> dict[str, FloatColumn]:
    """One Mamba-2 mixer: all columns of the first projection, what the scan puts out before and after the gate, the
    statistics of the norm behind it, and the last projection's input (mamba_ssm/ops/triton/ssd_combined.py
    MambaSplitConv1dScanCombinedFn and layernorm_gated.py LayerNormFn, mamba-ssm 2.3; core/ssm/mamba_mixer.py, core
    0.19). Over context ranks, heads are exchanged for sequence."""
    e, inner, heads = job.facts.activation_bytes, mamba.inner_width / rows.tensor, mamba.num_heads / rows.tensor
    return {
        "mamba_columns": tokens * e * (2.0 * (inner + _groups(mamba, rows) * mamba.state_size) + heads),
        "mamba_scan": tokens * 2.0 * e * inner,
        "mamba_statistics": tokens * FP32_BYTES * mamba.groups / rows.tensor,
        "mamba_proj_input": tokens * job.facts.linear_input_bytes * inner,
    }


def mamba_alive(job: Job, rows: RankColumns, mamba: Mamba, tokens: FloatColumn) -> FloatColumn:
    """Return what the scan of a Mamba-2 mixer has alive while it runs backward: the convolved columns and their
    gradients, the gradients of all columns, of its output before and after the gate, steps and decays of each head in
    fp32, products of each group within a chunk; of the states between chunks, these and their gradients in fp32 and
    once more as they are multiplied (ssd_combined.py _mamba_chunk_scan_combined_bwd and ssd_state_passing.py
    _state_passing_bwd, mamba-ssm 2.3)."""
    e, inner, heads = job.facts.activation_bytes, mamba.inner_width / rows.tensor, mamba.num_heads / rows.tensor
    groups = _groups(mamba, rows)
    convolved = inner + 2.0 * groups * mamba.state_size
    states = inner * mamba.state_size / MAMBA_CHUNK
    columns = e * (2.0 * convolved + (inner + convolved + heads) + 2.0 * inner)
    chunks = (2.0 * FP32_BYTES + 2.0 * e) * states + FP32_BYTES * groups * MAMBA_CHUNK
    return tokens * (columns + chunks + (2.0 * FP32_BYTES + e) * heads)
