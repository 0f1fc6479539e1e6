"""Muon's share of a pipeline rank: matrices that no data-parallel rank may cut, packed into the shards of buffers
(megatron/core/optimizer/layer_wise_optimizer.py LayerWiseDistributedOptimizer, core 0.19).

Each matrix of the blocks lies whole in the shard of one rank. All shards of a bucket are as long as the fullest, so
that a buffer is at least as long as its largest matrix times the ranks."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.matrix import INPUTS, OUTPUTS, Matrix
from llmlaunch.layers.model import model_of
from llmlaunch.memory.answers import once_for_splits
from llmlaunch.memory.job import Job, RankColumns

ALIGNED_ELEMENTS = 64
BUCKET_MULTIPLE = 128
FULL_BUCKET = 0.9  # of the largest matrix times the ranks, below which a bucket takes more matrices
BUCKET_ELEMENTS, BUCKET_ELEMENTS_OF_A_RANK = 40_000_000, 1_000_000


Layers = tuple[FloatColumn, ...]


@frozen
class WholeMatrices:
    """Elements on one device: all matrices that Muon updates and what their buffers hold beyond them, dense and expert
    kept apart; what the fullest data-parallel rank updates of them, and the largest. `products` are the operations by
    which that rank orthogonalizes its matrices."""

    dense: FloatColumn
    expert: FloatColumn
    dense_padding: FloatColumn
    expert_padding: FloatColumn
    updated: FloatColumn
    largest: FloatColumn
    products: FloatColumn


@once_for_splits
def whole_matrices(job: Job, rows: RankColumns) -> WholeMatrices:
    """Without ZeRO 1 no rank shares the optimizer, and nothing is padded."""
    lay, count = rows.layouts, len(rows)
    columns = np.zeros((7, count))
    sharded = lay.zero_stage >= 1
    ranks = np.where(sharded, lay.data * lay.context, 1)
    expert_ranks = np.where(
        sharded, np.maximum(lay.tensor * lay.context * lay.data // (lay.expert * lay.expert_tensor), 1), 1
    )
    matrices_of, counts = _by_kind(job, rows)
    for row in range(count):
        chunks = int(lay.virtual_pipeline[row])
        bucketed = bool(rows.first[row])
        t, etp, ep = int(lay.tensor[row]), int(lay.expert_tensor[row]), int(lay.expert[row])
        of_chunk = tuple(round(float(each[row]) / chunks) for each in counts)
        parts = matrices_of(of_chunk, False, t, 1), matrices_of(of_chunk, True, etp, ep)
        for place, (matrices, group) in enumerate(zip(parts, (int(ranks[row]), int(expert_ranks[row])), strict=True)):
            if not matrices.elements:
                continue
            whole = float(sum(matrices.elements)) * chunks
            padded, updated = 0.0, 0.0
            for chunk in range(min(chunks, 2)):  # all but the first are alike
                size, fullest = _packed(matrices.elements, group, bucketed and not chunk)
                times = 1 if chunk == 0 else chunks - 1
                padded, updated = padded + times * size, updated + times * fullest
            columns[place, row], columns[2 + place, row] = whole, padded - whole
            columns[4, row] += updated
            columns[5, row] = max(columns[5, row], max(matrices.elements))
            columns[6, row] += matrices.products * chunks * updated / whole
    return WholeMatrices(*columns)


def _by_kind(job: Job, rows: RankColumns) -> tuple[Callable[[tuple[int, ...], bool, int, int], _Matrices], Layers]:
    """Return what gives the matrices of so many layers of each kind, and how many such layers each row's rank has.
    Kinds whose matrices are alike are one; of kinds that a row does not tell apart, the one with the fewest elements
    counts."""
    kinds, counts = model_of(job.shape).kinds, dict[tuple[Matrix, ...], FloatColumn]()
    for group, count in zip(rows.groups, rows.counts, strict=True):
        if group:
            matrices = min((kinds[kind].matrices for kind in group), key=_elements)
            counts[matrices] = counts[matrices] + count if matrices in counts else count
    return cache(partial(_of_layers, tuple(counts))), tuple(counts.values())


def _elements(matrices: Sequence[Matrix]) -> float:
    return sum(matrix.count * matrix.elements for matrix in matrices)


@lru_cache(maxsize=4096)
def _packed(matrices: tuple[int, ...], ranks: int, bucketed: bool) -> tuple[int, int]:
    """Return the elements of a buffer with its padding, and those of its matrices that the fullest rank updates.

    Matrices are taken from the last layer to the first, until a bucket is full; of a bucket each next smaller one goes
    to the rank that has the least of it (`_compute_per_buffer_param_layout`)."""
    if ranks == 1:
        return sum(matrices), sum(matrices)
    least = max(BUCKET_ELEMENTS, BUCKET_ELEMENTS_OF_A_RANK * ranks) if bucketed else math.inf
    multiple = math.lcm(ALIGNED_ELEMENTS, math.lcm(ranks, BUCKET_MULTIPLE) // ranks)
    updated, total, bucket = [0] * ranks, 0, list[int]()
    for matrix in reversed(matrices):
        bucket.append(matrix)
        if bucketed and sum(bucket) >= max(least, FULL_BUCKET * ranks * max(bucket)):
            total += ranks * _shard(bucket, updated, multiple)
            bucket = []
    return total + (ranks * _shard(bucket, updated, multiple) if bucket else 0), max(updated)


def _shard(bucket: Sequence[int], updated: list[int], multiple: int) -> int:
    """Return the length of each rank's shard of a bucket, and add what each rank updates to `updated`."""
    heap = [(0, rank) for rank in range(len(updated))]
    fullest = 0
    for matrix in sorted(bucket, reverse=True):
        load, rank = heapq.heappop(heap)
        load = math.ceil(load / ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS + matrix
        updated[rank] += matrix
        fullest = max(fullest, load)
        heapq.heappush(heap, (load, rank))
    return math.ceil(fullest / multiple) * multiple


NEWTON_SCHULZ_STEPS = 5


@frozen
class _Matrices:
    """Matrices on one device, and the operations of five steps of Newton-Schulz, each of which multiplies X by its
    transpose, that by itself, and the sum by X (emerging_optimizers/orthogonalized_optimizers/muon_utils.py
    newton_schulz_step, NVIDIA-NeMo/Emerging-Optimizers fd77292)."""

    elements: tuple[int, ...]
    products: float


def _of_layers(
    kinds: Sequence[Sequence[Matrix]], counts: Sequence[int], of_experts: bool, ranks: int, expert: int
) -> _Matrices:
    """Return the matrices of a device's experts in so many layers of each kind, over so many expert-tensor `ranks` and
    `expert` ranks, or all others, over tensor `ranks`: a router is a matrix, too."""
    elements, products = list[int](), 0.0
    for matrices, count in zip(kinds, counts, strict=True):
        layer = list[int]()
        for matrix in matrices:
            if matrix.of_experts == of_experts:
                here = max(matrix.count // expert, 1)
                inputs = matrix.inputs / (ranks if matrix.divided == INPUTS else 1)
                outputs = matrix.outputs / (ranks if matrix.divided == OUTPUTS else 1)
                layer += [round(inputs * outputs)] * here
                products += count * here * _products(min(inputs, outputs), max(inputs, outputs))
        elements += layer * count
    return _Matrices(tuple(elements), products)


def _products(short: float, long: float) -> float:
    return NEWTON_SCHULZ_STEPS * (4.0 * short**2 * long + 2.0 * short**3)
