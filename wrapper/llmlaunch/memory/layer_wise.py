"""Muon's share of a pipeline rank: matrices that no data-parallel rank may cut, packed into the shards of buffers
(megatron/core/optimizer/layer_wise_optimizer.py LayerWiseDistributedOptimizer, core 0.19).

Each matrix of the blocks lies whole in the shard of one rank. All shards of a bucket are as long as the fullest, so
that a buffer is at least as long as its largest matrix times the ranks."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.memory.job import Job, RankColumns, mixture_layers, once_for_rows
from llmlaunch.models.linears import Linear, attention_linears, mlp_linears
from llmlaunch.models.shape import ModelShape

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
    shape, sharded = job.shape, lay.zero_stage >= 1
    ranks = np.where(sharded, lay.data * lay.context, 1)
    expert_ranks = np.where(
        sharded, np.maximum(lay.tensor * lay.context * lay.data // (lay.expert * lay.expert_tensor), 1), 1
    )
    for row in range(count):
        chunks = int(lay.virtual_pipeline[row])
        dense_layers, mixtures = (
            round(float(each[row]) / chunks)
            for each in (rows.layers - mixture_layers(job, rows), mixture_layers(job, rows))
        )
        bucketed = bool(rows.first[row])
        t, etp, local = int(lay.tensor[row]), int(lay.expert_tensor[row]), _local_experts(shape, int(lay.expert[row]))
        parts = (
            (_dense_layer(shape, t) * dense_layers + _mixture_layer(shape, t) * mixtures, int(ranks[row])),
            (_experts(shape, etp, local) * mixtures, int(expert_ranks[row])),
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


def _local_experts(shape: ModelShape, expert: int) -> int:
    return 0 if shape.moe is None else max(shape.moe.num_experts // expert, 1)


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


Matrices = tuple[_Matrix, ...]


@lru_cache(maxsize=1024)
def _dense_layer(shape: ModelShape, t: int) -> Matrices:
    return _matrices((*attention_linears(shape), *mlp_linears(shape, float(shape.ffn_hidden_size))), t)


@lru_cache(maxsize=1024)
def _mixture_layer(shape: ModelShape, t: int) -> Matrices:
    """All but the experts: a router is a matrix, too."""
    moe, h = shape.moe, float(shape.hidden_size)
    if moe is None:
        return ()
    gate = (Linear(h, 1.0, "neither"),) if moe.shared_expert_gate else ()
    shared = mlp_linears(shape, float(moe.shared_expert_ffn_hidden_size))
    return _matrices((*attention_linears(shape), *shared, Linear(h, float(moe.num_experts), "neither"), *gate), t)


@lru_cache(maxsize=1024)
def _experts(shape: ModelShape, etp: int, local: int) -> Matrices:
    if shape.moe is None:
        return ()
    each = _matrices(mlp_linears(shape, float(shape.moe.ffn_hidden_size)), etp)
    return tuple(matrix for matrix in each for _ in range(local))


def _matrices(linears: Sequence[Linear], split: int) -> Matrices:
    return tuple(_matrix(each, 1 if each.divided == "neither" else split) for each in linears)


def _matrix(linear: Linear, split: int) -> _Matrix:
    inputs = linear.inputs / (split if linear.divided == "inputs" else 1)
    outputs = linear.outputs / (split if linear.divided == "outputs" else 1)
    short, long = min(inputs, outputs), max(inputs, outputs)
    products = NEWTON_SCHULZ_STEPS * (4.0 * short**2 * long + 2.0 * short**3)
    return _Matrix(round(inputs * outputs), products)
