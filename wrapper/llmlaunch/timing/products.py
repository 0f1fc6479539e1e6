"""Matrix products and attention of one layer on one device, for one micro-batch.

A product of M x K by K x N takes its arithmetic at the rate large products reach, and a share of the time its operands
need through device memory, because a tile's first loads and its result are not hidden behind arithmetic:
`2 M N K / (efficiency x peak) + exposed x bytes / bandwidth`. So products with few rows, or made narrow by tensor
parallelism, are less efficient, and a weight's gradient, added to a wide buffer, costs a fixed time per micro-batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from llmlaunch.cluster.profile import Accelerator, Cluster
from llmlaunch.columns import FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.columns import LayerColumns
from llmlaunch.layers.matrix import INPUTS, NEITHER, Matrix, Part
from llmlaunch.layers.work import BlockWork
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.job import Job
from llmlaunch.memory.layer_bytes import job_columns

# Per logit. Kernel by kernel the eager loss reads and writes 52 bytes (to fp32, maximum, difference, exponential, sum,
# quotient, gradient, to bf16), the compiled one 32 (megatron/core/tensor_parallel/cross_entropy.py,
# fusions/fused_cross_entropy.py, core 0.19); of the first 24 are counted, because parts stay in the cache.
EAGER_LOSS_BYTES = 24.0
NATIVE_LOSS_BYTES = EAGER_LOSS_BYTES * 32.0 / 52.0


@cache
def _table() -> dict[str, dict[str, float | str]]:
    table: dict[str, dict[str, float | str]] = json.loads(Path(__file__).with_name("constants.json").read_text("utf-8"))
    return table


def constant(name: str) -> float:
    """Return a constant by name, in the unit its name ends in. Raises KeyError for a name that is not in the file."""
    return float(_table()[name]["value"])


@contextmanager
def replaced(values: Mapping[str, float]) -> Iterator[None]:
    """Replace values inside a `with` block: to fit constants, or to measure their effect. Raises KeyError for a new
    name."""
    table = _table()
    before = {name: table[name] for name in values}
    table.update({name: {**before[name], "value": value} for name, value in values.items()})
    try:
        yield
    finally:
        table.update(before)


def of_generation(name: str, accelerator: Accelerator) -> float:
    """Return the constant of the accelerator by its name, else of its compute capability, else of its generation (the
    whole part of that), else the one of devices that were never measured, `<name>_other`."""
    capability = accelerator.compute_capability
    versions = () if capability is None else (str(capability), str(int(float(capability))))
    known = (f"{name}_{key}" for key in (accelerator.name, *versions))
    return constant(next((key for key in known if key in _table()), f"{name}_other"))


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
    table, quantized = accelerator.flops_per_second, job.facts.layer.quantized
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
    quantized = job.facts.layer.quantized
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


def adapter_rates(job: Job, pace: DevicePace, beside: Sequence[tuple[Matrix, float]]) -> Rates:
    """Return the cost of the two products of the adapter beside each linear layer, given by its matrix and its columns
    of that; they are the only ones whose weights have gradients."""
    adapters = job.techniques.adapters
    assert adapters is not None
    rank = Part("", float(adapters.rank))
    pairs = [
        pair
        for matrix, columns in beside
        for pair in (
            Matrix(matrix.inputs, (rank,), matrix.divided),
            Matrix(rank.columns, (Part("", columns),), matrix.divided),
        )
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

    def work(self, rows: FloatColumn, rows_split: FloatColumn, matrices: FloatColumn) -> Work:
        """Return the seconds for `rows` and `rows_split`, over matrices whose divided share is `matrices` (1 / split,
        or how many of them there are by that). The backward pass computes the gradients of input and weights."""
        by_rows = self.per_row * rows + self.per_row_split * rows_split
        once = self.per_matrix_split * matrices
        if self.per_matrix:
            once = once + self.per_matrix
        return Work(by_rows + once, (1.0 + self.gradient_rows) * by_rows + (1.0 + self.gradient_traffic) * once)


def rates(job: Job, pace: DevicePace, matrices: Sequence[Matrix], wide: bool = False) -> Rates:
    """Return the cost of the products with `matrices`, one of each. A weight's gradient is added to a wide buffer, read
    and written (wgrad accumulation, megatron/core/tensor_parallel/layers.py, core 0.19). Frozen weights have none,
    sampled ones (WTA-CRS, Liu et al. 2023) are made of a share of the rows. `wide` products, and those that are not
    `narrow`, stay in the compute format."""
    e, frozen = job.facts.layer.activation_bytes, job.techniques.adapters is not None
    elements = whole = fixed = divided = multiplied = 0.0
    for matrix in matrices:
        undivided = _undivided(matrix)
        elements += matrix.elements
        whole += matrix.elements if matrix.divided == NEITHER else 0.0
        fixed += undivided
        divided += matrix.inputs + matrix.outputs - undivided
        multiplied += matrix.elements / (pace.linear if matrix.narrow and not wide else pace.wide)
    return Rates(
        per_row=e / pace.operands * fixed,
        per_row_split=2.0 * multiplied + e / pace.operands * divided,
        per_matrix_split=e / pace.operands * (elements - whole),
        per_matrix=e / pace.operands * whole,
        gradient_traffic=0.0 if frozen else 2.0 * GRADIENT_BUFFER_BYTES / e,
        gradient_rows=0.0 if frozen else job.techniques.sampled_share,
    )


def _undivided(matrix: Matrix) -> float:
    """Return the elements of a row's input and output that tensor parallelism does not divide."""
    if matrix.divided == NEITHER:
        return 0.0
    return matrix.outputs if matrix.divided == INPUTS else matrix.inputs


def seconds_of(job: Job, pace: DevicePace, work: BlockWork) -> Work:
    """Return the seconds of a block's work forward and backward."""
    faster = constant("narrow_attention_speedup") if job.facts.attention.attention_narrow else 1.0
    attention = faster * pace.attention_forward, faster * pace.attention_backward
    tail_rows = constant("attention_tail_rows"), pace.attention_backward_tail_rows
    slower = constant("element_wise_efficiency") / constant("permutation_efficiency")
    passes = []
    for amounts, rate, rows in zip(work, attention, tail_rows, strict=True):
        each = amounts.attention / rate + amounts.recurrence / pace.attention_forward
        each = each + amounts.wide / pace.wide + amounts.linear / pace.linear
        each = each + (amounts.bytes + slower * amounts.permuted_bytes) / pace.element_wise
        seconds = each * amounts.rows
        if amounts.tail is not None:
            seconds = seconds + (rows * pace.multiprocessors / rate) * amounts.tail
        passes.append(seconds)
    return Work(*passes)


@frozen
class SplitColumns:
    """`layouts` as floats, and what blocks of a layer see of them. `tokens` are those of one micro-batch on one
    context-parallel rank, `share` their part of one tensor-parallel rank (as matrices or the sequence are divided),
    `stream` those of the residual stream there: the share with sequence parallelism, else all of them."""

    layouts: LayoutColumns
    layer: LayerColumns
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
    layer = job_columns(job, layouts)
    return SplitColumns(
        layouts,
        layer,
        layer.tensor,
        layer.per_tensor,
        layouts.context.astype(np.float64),
        layouts.data.astype(np.float64),
        layouts.pipeline.astype(np.float64),
        layouts.virtual_pipeline.astype(np.float64),
        layer.tokens,
        layer.share,
        np.where(layouts.sequence_parallel > 0, layer.share, layer.tokens),
    )
