"""Products, attention and traffic of attention to pooled keys and of several residual streams, DeepSeek-V4's.

Counted from the sources of Megatron-LM's development branch at d48bd6be (August 2026): core/transformer/
experimental_attention_variant/csa.py and csa_utils/fused_sparse_attention.py, and core/transformer/hyper_connection.py.
No measured run stands behind them yet.
"""

from __future__ import annotations

from llmlaunch.memory.job import Job
from llmlaunch.models.attention import CHOSEN_FROM, CompressedAttention
from llmlaunch.models.kinds import kind_shares
from llmlaunch.models.linears import pooling_linears, projecting_linears
from llmlaunch.models.shape import ModelShape
from llmlaunch.timing.products import DevicePace, Rates, SplitColumns, Work, attended_keys, pooled_keys, rates

__all__ = ["compressed_element_wise", "compressed_rates", "compressed_scores"]


MIXING_PASSES = (8.0, 22.0)  # elements of all streams that both blocks read and write, forward and backward
HEAD_PASSES = (4.0, 8.0)  # of all heads' queries: their norm, and the output's positions turned back
POOLING_PASSES = (20.0, 40.0)  # of the columns that are pooled, of which weights in fp32 count twice


def compressed_rates(job: Job, pace: DevicePace) -> Rates:
    """Return the cost of the projections, in the mean of all layers. What pools, and the projection of heads by groups,
    stay in the compute format."""
    total = Rates()
    for shape, share in kind_shares(job.shape):
        narrow = rates(job, pace, projecting_linears(shape))
        total = total + (narrow + rates(job, pace, pooling_linears(shape), wide=True)).of_share(share)
    return total


def compressed_scores(job: Job, pace: DevicePace, at: SplitColumns) -> Work:
    """Return the seconds of attention to the last tokens and to pooled ones, and of choosing these: every pooled key
    before a token is scored; the loss that teaches it multiplies queries and chosen keys once more, and makes the
    indexer's gradients at once."""
    forward = backward = 0.0
    for shape, share in kind_shares(job.shape):
        both, choice, taught = _operations(shape, job.workload.sequence_length)
        forward += share * (both / pace.attention_forward + choice / pace.attention_forward + taught / pace.wide)
        backward += share * 2.5 * both / pace.attention_backward
    return Work(forward * at.tokens, backward * at.tokens)


def _operations(shape: ModelShape, sequence_length: int) -> tuple[float, float, float]:
    """Return a token's operations forward: of attention, of what the indexer is taught by, and of the indexer."""
    compressed = shape.compressed_attention
    assert compressed is not None
    both = 2.0 * attended_keys(shape, sequence_length) * 2.0 * shape.query_width
    if compressed.ratio != CHOSEN_FROM:
        return both, 0.0, 0.0
    keys, width = pooled_keys(compressed, sequence_length), compressed.index_heads * compressed.index_head_dim
    scored = 2.0 * sequence_length / (2.0 * CHOSEN_FROM) * width
    return both, 2.0 * keys * shape.query_width, scored + 4.0 * keys * width


def compressed_element_wise(job: Job, pace: DevicePace, at: SplitColumns) -> Work:
    """Return the seconds of reading and writing what mixes residual streams, pools keys and norms and turns heads."""
    each = job.facts.activation_bytes / pace.element_wise
    columns = sum(share * _pooled_columns(shape) for shape, share in kind_shares(job.shape))
    streams = job.shape.stream_width if job.shape.residual_streams > 1 else 0
    heads = job.shape.query_width if job.shape.compressed_attention is not None else 0
    forward, backward = (
        each * (mixing * streams + turning * heads + pooling * columns)
        for mixing, turning, pooling in zip(MIXING_PASSES, HEAD_PASSES, POOLING_PASSES, strict=True)
    )
    return Work(forward * at.tokens, backward * at.tokens)


def _pooled_columns(shape: ModelShape) -> float:
    compressed: CompressedAttention | None = shape.compressed_attention
    if compressed is None:
        return 0.0
    narrow = compressed.index_head_dim if compressed.ratio == CHOSEN_FROM else 0
    return float(compressed.halves * (shape.head_dim + narrow))
