"""Matrix products and attention of one layer on one device, for one micro-batch.

A product of M x K by K x N takes its arithmetic at the rate large products reach, and a share of the time its operands
need through device memory, because a tile's first loads and its result are not hidden behind arithmetic:
`2 M N K / (efficiency x peak) + exposed x bytes / bandwidth`. So products with few rows, or made narrow by tensor
parallelism, are less efficient, and a weight's gradient, added to a wide buffer, costs a fixed time per micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add

import numpy as np

from llmlaunch.cluster.profile import Accelerator, Cluster
from llmlaunch.columns import FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.sparse_attention import KERNEL_HEADS
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.job import Job
from llmlaunch.models.attention import CHOSEN_FROM, CompressedAttention, Indexer
from llmlaunch.models.kinds import kind_shares, layer_parts
from llmlaunch.models.linears import Linear, attention_linears, delta_linears, mamba_linears
from llmlaunch.models.mixture import MoeShape
from llmlaunch.models.shape import ModelShape
from llmlaunch.techniques import OF_ATTENTION
from llmlaunch.timing.constants import constant, of_generation

__all__ = [
    "ATTENTION_BACKWARD",
    "DevicePace",
    "FormatPeaks",
    "Rates",
    "SplitColumns",
    "Work",
    "adapted_linears",
    "adapted_of_mixture",
    "adapter_rates",
    "attended_keys",
    "attention_scores",
    "mean_mixer_rates",
    "mixed_columns",
    "pace",
    "part_share",
    "peaks",
    "pooled_keys",
    "rates",
    "split_of",
]


ATTENTION_BACKWARD = 2.5  # five products for the two forward (Dao 2023, section 3)
GRADIENT_BUFFER_BYTES = 4.0  # of what weights' gradients are added to, whatever they are reduced in
MULTIPROCESSORS = {7: 80, 8: 108, 9: 132, 10: 148}  # streaming multiprocessors of V100, A100, H100 SXM, B200


@frozen
class Work:
    """Seconds forward and backward."""

    forward: FloatColumn
    backward: FloatColumn

    def __add__(self, other: Work) -> Work:
        return Work(self.forward + other.forward, self.backward + other.backward)

    @property
    def both(self) -> FloatColumn:
        return self.forward + self.backward


@frozen
class DevicePace:
    """Rates of a device per second, efficiencies included: operations of large products in the compute format and in
    the narrower one of quantized linear layers, operations of attention forward and backward, bytes an element-wise
    pass moves, and bytes of a product's operands (as if they alone were waited for)."""

    wide: float
    linear: float
    attention_forward: float
    attention_backward: float
    element_wise: float
    operands: float
    multiprocessors: int
    host_seconds_factor: float  # of the seconds a host takes to launch kernels
    attention_backward_tail_rows: float


@frozen
class FormatPeaks:
    """Dense peaks of a device in operations per second: `wide` in the compute format, `linear` in that of the blocks'
    linear layers, which is narrower where these are quantized."""

    wide: float
    linear: float


def peaks(job: Job, accelerator: Accelerator) -> FormatPeaks:
    """Return the peaks of the formats in which a job computes."""
    table, quantized = accelerator.flops_per_second, job.facts.quantized
    wide = table.get(job.workload.precision) or table.get("bf16") or max(table.values())
    if quantized is None or "fp8" not in table:
        return FormatPeaks(wide, wide)
    narrow = table.get("fp4", 2.0 * table["fp8"]) if quantized.input_bytes < 1.0 else table["fp8"]
    return FormatPeaks(wide, max(narrow, wide))


def pace(job: Job, cluster: Cluster) -> DevicePace:
    """Return the rates of `cluster`'s devices in the job's number format."""
    device = cluster.accelerator
    peak = peaks(job, device)
    wide = linear = of_generation("matrix_efficiency", device) * peak.wide
    quantized = job.facts.quantized
    if quantized is not None and "fp8" in device.flops_per_second:
        if quantized.input_bytes < 1.0:
            linear = of_generation("four_bit_matrix_efficiency", device) * peak.linear
        else:
            linear = of_generation("narrow_matrix_efficiency", device) * peak.linear
            linear *= constant("block_scaled_efficiency") if quantized.block_scaled else 1.0
    memory = device.memory_bytes_per_second
    generation = int(float(device.compute_capability)) if device.compute_capability else 0
    return DevicePace(
        wide=wide,
        linear=max(linear, wide),
        attention_forward=of_generation("attention_forward_efficiency", device) * peak.wide,
        attention_backward=of_generation("attention_backward_efficiency", device) * peak.wide,
        element_wise=constant("element_wise_efficiency") * memory,
        operands=memory / constant("matrix_traffic_exposed"),
        multiprocessors=MULTIPROCESSORS.get(generation, 0),
        host_seconds_factor=cluster.host_seconds_factor,
        attention_backward_tail_rows=of_generation("attention_backward_tail_rows", device),
    )


def part_share(shape: ModelShape, part: str) -> float:
    """Return the share of layers that have `part` in the place of attention; of layers of one part each, of those that
    are no mixtures."""
    parts = [each for each in layer_parts(shape) if each != "mixture"]
    return parts.count(part) / len(parts)


def mixed_columns(shape: ModelShape, mixture: bool) -> tuple[float, float]:
    """Return the columns that the last projection of attention takes in and that the first one puts out; of layers of
    one part each, the mean of theirs."""
    attention = float(shape.query_width), shape.query_width + 2.0 * shape.key_value_width
    mamba = shape.mamba
    if mamba is None:
        return attention
    if mixture:
        return 0.0, 0.0
    share, full = part_share(shape, "mamba"), part_share(shape, "attention")
    inner, projected = share * mamba.inner_width, share * mamba.projected_width
    return inner + full * attention[0], projected + full * attention[1]


def adapted_linears(shape: ModelShape, targets: frozenset[str] | None = None) -> tuple[Linear, ...]:
    """Return the linear layers of a dense block that adapters may stand beside, as Hugging Face's models have them:
    apart for queries, keys and values, and for gate and up; with `targets`, those that have one. Of latent attention
    all layers have one, or none."""
    h, query, key_value = float(shape.hidden_size), float(shape.query_width), float(shape.key_value_width)
    width = float(shape.ffn_hidden_size)
    linears = [
        ("q_proj", Linear(h, query, "outputs")),
        ("k_proj", Linear(h, key_value, "outputs")),
        ("v_proj", Linear(h, key_value, "outputs")),
        ("o_proj", Linear(query, h, "inputs")),
    ]
    if shape.mla is not None:
        linears = [("o_proj", linear) for linear in attention_linears(shape)]
    linears += [(name, Linear(h, width, "outputs")) for name in ("gate_proj", "up_proj")[not shape.gated_mlp :]]
    linears.append(("down_proj", Linear(width, h, "inputs")))
    return tuple(linear for name, linear in linears if targets is None or name in targets)


def adapted_of_mixture(
    shape: ModelShape, moe: MoeShape, targets: frozenset[str]
) -> tuple[tuple[Linear, ...], tuple[Linear, ...]]:
    """Return the linear layers of a mixture layer that have an adapter: those that every token passes through, and
    those of one expert."""
    every_token = adapted_linears(shape, targets.intersection(OF_ATTENTION))
    narrower = targets.difference(OF_ATTENTION)
    experts = adapted_linears(replace(shape, ffn_hidden_size=moe.ffn_hidden_size), narrower)
    if shared := moe.shared_expert_ffn_hidden_size:
        every_token += adapted_linears(replace(shape, ffn_hidden_size=shared), narrower)
    return every_token, experts


def adapter_rates(job: Job, pace: DevicePace, linears: Sequence[Linear]) -> Rates:
    """Return the cost of the two products of the adapter beside each of the linear layers, the only ones whose weights
    have gradients."""
    adapters = job.techniques.adapters
    assert adapters is not None
    rank = float(adapters.rank)
    pairs = [
        pair
        for linear in linears
        for pair in (Linear(linear.inputs, rank, linear.divided), Linear(rank, linear.outputs, linear.divided))
    ]
    return replace(rates(job, pace, pairs, wide=True), gradient_rows=1.0)


@frozen
class Rates:
    """Seconds of matrix products forward: `per_row` for every row on the device, `per_row_split` for every row divided
    as the matrices are, and once `per_matrix_split` for matrices divided and `per_matrix` for those that are not.
    `gradient_traffic` is what the weights' gradients move, in passes over a matrix, `gradient_rows` the share of the
    rows they are made of; both 0 for frozen weights."""

    per_row: float = 0.0
    per_row_split: float = 0.0
    per_matrix_split: float = 0.0
    per_matrix: float = 0.0
    gradient_traffic: float = 0.0
    gradient_rows: float = 1.0

    def __add__(self, other: Rates) -> Rates:
        return Rates(
            self.per_row + other.per_row,
            self.per_row_split + other.per_row_split,
            self.per_matrix_split + other.per_matrix_split,
            self.per_matrix + other.per_matrix,
            max(self.gradient_traffic, other.gradient_traffic),
            min(self.gradient_rows, other.gradient_rows),
        )

    def of_share(self, share: float) -> Rates:
        """Return the mean over layers of which a share has these products."""
        names = ("per_row", "per_row_split", "per_matrix_split", "per_matrix")
        return replace(self, **{name: share * getattr(self, name) for name in names})

    def work(self, rows: FloatColumn, rows_split: FloatColumn, matrices: FloatColumn) -> Work:
        """Return the seconds for `rows` and `rows_split`, over matrices whose divided share is `matrices` (1 / split,
        or how many of them there are by that). The backward pass computes the gradients of input and weights."""
        by_rows = self.per_row * rows + self.per_row_split * rows_split
        once = self.per_matrix_split * matrices
        if self.per_matrix:
            once = once + self.per_matrix
        return Work(by_rows + once, (1.0 + self.gradient_rows) * by_rows + (1.0 + self.gradient_traffic) * once)


def rates(job: Job, pace: DevicePace, linears: Sequence[Linear], wide: bool = False) -> Rates:
    """Return the cost of the products of `linears`. A weight's gradient is added to a wide buffer, read and written
    (wgrad accumulation, megatron/core/tensor_parallel/layers.py, core 0.19). Frozen weights have none, sampled ones
    (WTA-CRS, Liu et al. 2023) are made of a share of the rows. `wide` products stay in the compute format."""
    e, frozen = job.facts.activation_bytes, job.techniques.adapters is not None
    elements = sum(linear.inputs * linear.outputs for linear in linears)
    whole = sum(linear.inputs * linear.outputs for linear in linears if linear.divided == "neither")
    fixed = sum(_undivided(linear) for linear in linears)
    divided = sum(linear.inputs + linear.outputs - _undivided(linear) for linear in linears)
    rate = pace.wide if wide else pace.linear
    return Rates(
        per_row=e / pace.operands * fixed,
        per_row_split=2.0 * elements / rate + e / pace.operands * divided,
        per_matrix_split=e / pace.operands * (elements - whole),
        per_matrix=e / pace.operands * whole,
        gradient_traffic=0.0 if frozen else 2.0 * GRADIENT_BUFFER_BYTES / e,
        gradient_rows=0.0 if frozen else job.techniques.sampled_share,
    )


def mean_mixer_rates(job: Job, pace: DevicePace, mixture: bool) -> Rates:
    """Return the cost of the projections of attention and of what stands in its place, in the mean of all layers; of
    layers of one part each, of those that are mixtures or of those that are not."""
    shape = job.shape
    if shape.mamba is not None and mixture:
        return Rates()
    linears = {"attention": attention_linears, "linear": delta_linears, "mamba": mamba_linears}
    shares = {part: part_share(shape, part) for part in linears}
    of_parts = {part: kind_shares(shape) if part == "attention" else ((shape, 1.0),) for part in linears}
    several = [
        rates(job, pace, linears[part](kind)).of_share(shares[part] * share)
        for part, kinds in of_parts.items()
        for kind, share in kinds
        if shares[part]
    ]
    return reduce(add, several) if several else Rates()


def _undivided(linear: Linear) -> float:
    """Return the elements of a row's input and output that tensor parallelism does not divide."""
    return {"inputs": linear.outputs, "outputs": linear.inputs, "neither": 0.0}[linear.divided]


def attended_keys(shape: ModelShape, sequence_length: int) -> float:
    """Return the keys that a token attends to, averaged over tokens and layers: half of the sequence where attention is
    causal, or of the piece where the sequence is cut; of the tokens behind the first `most`, `most` where a window or
    an indexer leaves no more. In a sequence of s that is most - most^2 / 2s (Beltagy et al. 2020, section 3.1: a
    window's cost is linear in the sequence)."""
    window, whole, compressed = shape.sliding_window, sequence_length / 2.0, shape.compressed_attention
    if compressed is not None:
        return _causal_mean(compressed.window, sequence_length) + pooled_keys(compressed, sequence_length)
    if shape.indexer is not None:
        return _causal_mean(shape.indexer.topk, sequence_length)
    if window is None:
        return whole
    share = _windowed_share(shape)
    seen = min(window.tokens, sequence_length) / 2.0 if window.chunked else _causal_mean(window.tokens, sequence_length)
    return share * seen + (1.0 - share) * whole


def pooled_keys(compressed: CompressedAttention, sequence_length: int) -> float:
    """Return the pooled keys that a token attends to, averaged over tokens."""
    pooled = sequence_length // compressed.ratio if compressed.ratio else 0
    if not pooled:
        return 0.0
    return _causal_mean(compressed.index_topk if compressed.ratio == CHOSEN_FROM else pooled, pooled)


def _causal_mean(most: int, sequence_length: int) -> float:
    seen = float(min(most, sequence_length))
    return seen - seen * seen / (2.0 * sequence_length)


def _windowed_share(shape: ModelShape) -> float:
    """Return the share of layers that have a window, if the model has any."""
    window = shape.sliding_window
    if window is None:
        return 0.0
    whole = shape.num_layers // window.full_every if window.full_every else 0
    return 1.0 - whole / shape.num_layers


def _keys_of(job: Job) -> tuple[float, float]:
    """Return the keys that attention multiplies a token's query with, and those of the last token: a window that is a
    mask spares nothing."""
    shape, s = job.shape, job.workload.sequence_length
    window = shape.sliding_window
    if window is None or job.facts.windows_masked:
        return s / 2.0, float(s)
    share = _windowed_share(shape)
    return attended_keys(shape, s), share * min(window.tokens, s) + (1.0 - share) * s


def attention_scores(job: Job, pace: DevicePace, at: SplitColumns) -> Work:
    """Return the seconds of softmax(QK)V over a device's queries and their keys, flash attention (Dao 2023, section 3):
    two products forward, five backward; half of the square, or less of it in layers with a window, whose other blocks
    the kernels leave out. A block of queries that sees the whole sequence is started last and waited for, which is long
    where heads are few. Of a sequence in c pieces, one is causal; the others are rectangles, whose blocks are alike and
    end half a block apart."""
    shape, (keys, seen) = job.shape, _keys_of(job)
    if shape.mla is None:
        width, head_width = 2.0 * shape.query_width, 2.0 * shape.head_dim
    else:
        head_width = float(shape.mla.qk_head_dim + shape.mla.qk_pos_emb_head_dim + shape.mla.v_head_dim)
        width = shape.num_attention_heads * head_width
    if job.facts.attention_scores_saved:
        return _unfused(job, pace, width, at)
    if shape.indexer is not None:
        return _sparse(job, pace, at, shape.indexer)
    faster = constant("narrow_attention_speedup") if job.facts.attention_narrow else 1.0
    forward = 1.0 / (faster * pace.attention_forward)
    backward = ATTENTION_BACKWARD / (faster * pace.attention_backward)
    tail = seen * head_width * pace.multiprocessors * (1.0 + 1.0 / at.context)
    rows = constant("attention_tail_rows") * forward, pace.attention_backward_tail_rows * backward
    multiplied = 2.0 * keys * width  # 2 operations x keys x width of keys and values
    return Work((multiplied * forward) * at.share + rows[0] * tail, (multiplied * backward) * at.share + rows[1] * tail)


def _sparse(job: Job, pace: DevicePace, at: SplitColumns, indexer: Indexer) -> Work:
    """Return the seconds of attention to chosen keys, heads as wide as the latent, and of choosing them
    (megatron/core/transformer/experimental_attention_variant/dsa_cudnn_kernels.py, core 0.19): the indexer, whole on
    every tensor rank, projects and scores every key before a token; the loss that teaches it multiplies queries and
    chosen keys once more, and makes the indexer's gradients at once. Kernels that gather keys are as fast as others
    (FlashMLA, README: 640 against 660 teraflops on H800)."""
    shape, mla, s = job.shape, job.shape.mla, float(job.workload.sequence_length)
    assert mla is not None
    assert mla.q_lora_rank is not None
    keys, wide = attended_keys(shape, job.workload.sequence_length), mla.kv_lora_rank + mla.qk_pos_emb_head_dim
    heads = np.maximum(shape.num_attention_heads * at.per_tensor, KERNEL_HEADS)
    both = 2.0 * keys * (wide + mla.kv_lora_rank) * heads
    width = indexer.heads * indexer.head_dim
    projected = 2.0 * (mla.q_lora_rank * width + shape.hidden_size * (indexer.head_dim + indexer.heads)) / pace.linear
    scored, taught = s * width / pace.wide, 4.0 * keys * width / pace.wide
    target = 2.0 * keys * wide * heads
    forward = (both + target) / pace.attention_forward + projected + scored + taught
    return Work(forward * at.tokens, (ATTENTION_BACKWARD * both / pace.attention_backward + projected) * at.tokens)


def _unfused(job: Job, pace: DevicePace, width: float, at: SplitColumns) -> Work:
    """Return the seconds of attention with scores in memory: the whole square, as plain products, and softmax and
    dropout pass by pass (Korthikanti et al. 2022, section 4: 5 bytes of every score are kept; written once and read
    twice or more)."""
    shape, s = job.shape, float(job.workload.sequence_length)
    products = 2.0 * s * width / pace.wide
    passes = 6.0 + (2.5 if shape.attention_dropout else 0.0)  # elements of two bytes read or written, forward
    through = passes * 2.0 / pace.element_wise * shape.num_attention_heads * s
    return Work((products + through) * at.share, (2.0 * products + through) * at.share)


@frozen
class SplitColumns:
    """`layouts` as floats. `tokens` are those of one micro-batch on one context-parallel rank, `share` their part of
    one tensor-parallel rank (as matrices or the sequence are divided), `stream` those of the residual stream there:
    the share with sequence parallelism, else all of them."""

    layouts: LayoutColumns
    tensor: FloatColumn
    per_tensor: FloatColumn  # 1 / tensor
    context: FloatColumn
    data: FloatColumn
    pipeline: FloatColumn
    chunks: FloatColumn
    tokens: FloatColumn
    share: FloatColumn
    stream: FloatColumn

    def __len__(self) -> int:
        return len(self.tensor)


def split_of(job: Job, layouts: LayoutColumns) -> SplitColumns:
    """Return the columns of `layouts`, computed once for all formulas."""
    tensor = layouts.tensor.astype(np.float64)
    context = layouts.context.astype(np.float64)
    tokens = job.workload.sequence_length * layouts.micro_batch_size / context
    per_tensor = 1.0 / tensor
    share = tokens * per_tensor
    return SplitColumns(
        layouts,
        tensor,
        per_tensor,
        context,
        layouts.data.astype(np.float64),
        layouts.pipeline.astype(np.float64),
        layouts.virtual_pipeline.astype(np.float64),
        tokens,
        share,
        np.where(layouts.sequence_parallel > 0, share, tokens),
    )
