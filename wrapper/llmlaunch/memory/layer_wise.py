"""Muon's share of a pipeline rank: matrices that no data-parallel rank may cut, packed into the shards of buffers
(megatron/core/optimizer/layer_wise_optimizer.py LayerWiseDistributedOptimizer, core 0.19).

Each matrix of the blocks lies whole in the shard of one rank. All shards of a bucket are as long as the fullest, so
that a buffer is at least as long as its largest matrix times the ranks."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.matrix import INPUTS, OUTPUTS, Matrix
from llmlaunch.layers.model import model_of
from llmlaunch.memory.job import Job, RankColumns, once_for_rows

__all__ = ["WholeMatrices", "whole_matrices"]

ALIGNED_ELEMENTS = 64
BUCKET_MULTIPLE = 128
FULL_BUCKET = 0.9  # of the largest matrix times the ranks, below which a bucket takes more matrices
BUCKET_ELEMENTS, BUCKET_ELEMENTS_OF_A_RANK = 40_000_000, 1_000_000


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


@once_for_rows
def whole_matrices(job: Job, rows: RankColumns) -> WholeMatrices:
    """Without ZeRO 1 no rank shares the optimizer, and nothing is padded."""
    lay, count = rows.layouts, len(rows)
    columns = np.zeros((7, count))
    sharded = lay.zero_stage >= 1
    ranks = np.where(sharded, lay.data * lay.context, 1)
    expert_ranks = np.where(
        sharded, np.maximum(lay.tensor * lay.context * lay.data // (lay.expert * lay.expert_tensor), 1), 1
    )
    layers = _layers(job, rows)
    for row in range(count):
        chunks = int(lay.virtual_pipeline[row])
        bucketed = bool(rows.first[row])
        t, etp, ep = int(lay.tensor[row]), int(lay.expert_tensor[row]), int(lay.expert[row])
        held = [(here, round(float(every[row]) / chunks)) for here, every in layers]
        parts = (
            (sum((here.dense(t) * times for here, times in held), ()), int(ranks[row])),
            (sum((here.experts(etp, ep) * times for here, times in held), ()), int(expert_ranks[row])),
        )
        for place, (matrices, group) in enumerate(parts):
            if not matrices:
                continue
            elements = tuple(matrix.elements for matrix in matrices)
            whole = float(sum(elements)) * chunks
            padded, updated = 0.0, 0.0
            for chunk in range(min(chunks, 2)):  # all but the first are alike
                size, fullest = _packed(elements, group, bucketed and not chunk)
                times = 1 if chunk == 0 else chunks - 1
                padded, updated = padded + times * size, updated + times * fullest
            columns[place, row], columns[2 + place, row] = whole, padded - whole
            columns[4, row] += updated
            columns[5, row] = max(columns[5, row], max(elements))
            columns[6, row] += sum(matrix.products for matrix in matrices) * chunks * updated / whole
    return WholeMatrices(*columns)


def _layers(job: Job, rows: RankColumns) -> list[tuple[_LayerMatrices, FloatColumn]]:
    """Return the matrices of a layer of each kind, and how many such layers each row's rank has. Kinds whose matrices
    are alike are one; of kinds that a row does not tell apart, the one with the smallest counts."""
    kinds, counts = model_of(job.shape).kinds, dict[tuple[Matrix, ...], FloatColumn]()
    for group, count in zip(rows.groups, rows.counts, strict=True):
        if group:
            matrices = min((kinds[kind].matrices for kind in group), key=_elements)
            counts[matrices] = counts[matrices] + count if matrices in counts else count
    return [(_LayerMatrices(matrices), count) for matrices, count in counts.items()]


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
class _Matrix:
    """A matrix on one device, and the operations of five steps of Newton-Schulz, each of which multiplies X by its
    transpose, that by itself, and the sum by X (emerging_optimizers/orthogonalized_optimizers/muon_utils.py
    newton_schulz_step, NVIDIA-NeMo/Emerging-Optimizers fd77292)."""

    elements: int
    products: float


class _LayerMatrices:
    """The matrices of one layer, as devices have them."""

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self._dense = [matrix for matrix in matrices if not matrix.of_experts]
        self._experts = [matrix for matrix in matrices if matrix.of_experts]
        self._known: dict[tuple[int, ...], tuple[_Matrix, ...]] = {}

    def dense(self, tensor: int) -> tuple[_Matrix, ...]:
        """Return all but the experts': a router is a matrix, too."""
        return self._once((tensor,), lambda: tuple(_matrix(matrix, tensor) for matrix in self._dense))

    def experts(self, expert_tensor: int, expert: int) -> tuple[_Matrix, ...]:
        """Return those of a device's experts."""
        return self._once(
            (expert_tensor, expert),
            lambda: tuple(
                _matrix(matrix, expert_tensor)
                for matrix in self._experts
                for _ in range(max(matrix.count // expert, 1))
            ),
        )

    def _once(self, split: tuple[int, ...], made: Callable[[], tuple[_Matrix, ...]]) -> tuple[_Matrix, ...]:
        if split not in self._known:
            self._known[split] = made()
        return self._known[split]


def _matrix(matrix: Matrix, ranks: int) -> _Matrix:
    inputs = matrix.inputs / (ranks if matrix.divided == INPUTS else 1)
    outputs = matrix.outputs / (ranks if matrix.divided == OUTPUTS else 1)
    short, long = min(inputs, outputs), max(inputs, outputs)
    products = NEWTON_SCHULZ_STEPS * (4.0 * short**2 * long + 2.0 * short**3)
    return _Matrix(round(inputs * outputs), products)
