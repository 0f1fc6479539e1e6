"""The weight matrices of the layers that a pipeline rank has, each with its shape on one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn
from llmlaunch.frozen import frozen
from llmlaunch.memory.heads import head_rank
from llmlaunch.memory.job import Job, RankColumns, once_for_rows
from llmlaunch.models.kinds import head_kinds
from llmlaunch.models.linears import (
    Linear,
    attention_linears,
    delta_linears,
    latent_linears,
    mamba_linears,
    mlp_linears,
    projecting_linears,
)
from llmlaunch.models.parameters import indexer_parameters
from llmlaunch.models.shape import ModelShape

__all__ = ["distinct_elements", "largest_matrices"]


@frozen
class _Split:
    """The sizes that split matrices, once for every pair that occurs, and which of the pairs each row has."""

    tensor: FloatColumn
    expert_tensor: FloatColumn
    of_row: IntColumn

    @classmethod
    def of(cls, rows: RankColumns) -> _Split:
        tensor, expert_tensor = rows.layouts.tensor, rows.layouts.expert_tensor
        pairs = np.stack((tensor, expert_tensor))
        _, example, of_row = np.unique(pairs, axis=1, return_index=True, return_inverse=True)
        return cls(tensor[example].astype(np.float64), expert_tensor[example].astype(np.float64), of_row.reshape(-1))


@frozen
class _Matrix:
    """A matrix of `inputs` x `outputs`, by pair of `_Split`, and whether each row's rank has a layer with it. `widest`
    is the share of its outputs in the largest of the projections that it fuses."""

    inputs: FloatColumn
    outputs: FloatColumn
    here: BoolColumn
    of_expert: bool = False
    widest: float = 1.0


@once_for_rows
def distinct_elements(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the elements of the matrices of a rank's layers whose shapes differ, each shape once, whichever block has
    it. Norms of latents are no matrices; a sparse attention's indexer is counted whole."""
    split, earlier, total = _Split.of(rows), list[_Matrix](), np.zeros(len(rows))
    for matrix in _matrices(job, rows, split):
        new = matrix.here
        for other in earlier:
            alike = (matrix.inputs == other.inputs) & (matrix.outputs == other.outputs)
            if np.any(alike):
                new = new & ~(alike[split.of_row] & other.here)
        total = total + np.where(new, (matrix.inputs * matrix.outputs)[split.of_row], 0.0)
        earlier.append(matrix)
    return total + indexer_parameters(job.shape) * _with_layers(job, rows)


@once_for_rows
def largest_matrices(job: Job, rows: RankColumns) -> tuple[FloatColumn, FloatColumn]:
    """Return the elements of the largest matrix of a rank's layers outside experts, and of the first or second matrices
    of all experts of a device together; 0 where the rank has none. Where a framework keeps projections apart that
    another fuses, each counts alone, except those of experts."""
    split, moe = _Split.of(rows), job.shape.moe
    dense, expert = np.zeros(len(rows)), np.zeros(len(rows))
    for matrix in _matrices(job, rows, split):
        widest = matrix.widest if job.facts.projections_apart else 1.0
        elements = widest * np.where(matrix.here, (matrix.inputs * matrix.outputs)[split.of_row], 0.0)
        if matrix.of_expert and moe is not None:
            expert = np.maximum(expert, elements * (moe.num_experts / rows.layouts.expert))
        else:
            dense = np.maximum(dense, elements)
    return dense, expert


def _matrices(job: Job, rows: RankColumns, split: _Split) -> Iterator[_Matrix]:
    shape, moe = job.shape, job.shape.moe
    dense, mixture = _layers_here(job, rows)
    yield from _mixers(job, rows, split, dense | mixture)
    shares, none = rows.shares or {}, np.zeros(len(rows))
    mlp = dense if shape.mamba is None else dense & (shares.get("mlp", none) > 0)
    halves = (0.5, 1.0) if shape.gated_mlp else (1.0, 1.0)
    yield from _split_by(mlp_linears(shape, float(shape.ffn_hidden_size)), split, mlp, widest=halves)
    if moe is None:
        return
    experts = mlp_linears(shape, float(moe.ffn_hidden_size), shape.expert_width)
    yield from _split_by(experts, split, mixture, of_expert=True)
    shared = mlp_linears(shape, float(moe.shared_expert_ffn_hidden_size))
    yield from _split_by(shared, split, mixture, widest=halves)
    yield from _split_by(latent_linears(shape), split, mixture)


def _layers_here(job: Job, rows: RankColumns) -> tuple[BoolColumn, BoolColumn]:
    """Return whether each row's rank has dense layers, and mixtures, those of prediction heads among them."""
    dense, mixture = rows.dense_layers > 0, rows.moe_layers > 0
    if job.shape.mtp_num_layers:
        with_heads, (predicts_dense, predicts_mixture) = (
            np.equal(rows.rank, head_rank(job, rows.layouts)),
            head_kinds(job.shape),
        )
        dense, mixture = dense | (with_heads & (predicts_dense > 0)), mixture | (with_heads & (predicts_mixture > 0))
    return dense, mixture


def _with_layers(job: Job, rows: RankColumns) -> BoolColumn:
    dense, mixture = _layers_here(job, rows)
    return dense | mixture


def _mixers(job: Job, rows: RankColumns, split: _Split, here: BoolColumn) -> Iterator[_Matrix]:
    """Return the matrices of attention, by kind, and of what stands in its place."""
    shape, none = job.shape, np.zeros(len(rows))
    if rows.shares is None and shape.mamba is not None:  # what a rank has of each is not known
        return
    attention = here if rows.shares is None else here & (rows.shares.get("attention", none) > 0)
    if rows.kind_shares is None:
        yield from _attention(shape, split, attention)
    else:
        for alike, share in zip(job.by_attention, rows.kind_shares, strict=True):
            yield from _attention(alike.shape, split, attention & (share > 0))
    if rows.shares is not None:
        yield from _split_by(delta_linears(shape), split, here & (rows.shares.get("linear", none) > 0))
        yield from _split_by(mamba_linears(shape), split, here & (rows.shares.get("mamba", none) > 0))


def _attention(shape: ModelShape, split: _Split, here: BoolColumn) -> Iterator[_Matrix]:
    if shape.compressed_attention is not None:  # which tensor parallelism does not split
        whole = [Linear(linear.inputs, linear.outputs, "neither") for linear in projecting_linears(shape)]
        yield from _split_by(whole, split, here)
        return
    first, *others = attention_linears(shape)
    if shape.mla is None:  # every tensor rank has a key and a value at least (transformer_config.py, core 0.19)
        repeated = np.maximum(split.tensor / shape.num_query_groups, 1.0) - 1.0
        columns = first.outputs + repeated * shape.projected_groups * shape.key_value_width
        queries = shape.query_width * (2.0 if shape.attention_gate else 1.0) / first.outputs
        widest = max(queries, shape.key_value_width / first.outputs)
        yield _Matrix(np.full(len(columns), first.inputs), columns / split.tensor, here, widest=widest)
    else:
        others = [first, *others]
    yield from _split_by(others, split, here)


def _split_by(
    linears: Sequence[Linear],
    split: _Split,
    here: BoolColumn,
    of_expert: bool = False,
    widest: Sequence[float] = (),
) -> Iterator[_Matrix]:
    ranks, ones = split.expert_tensor if of_expert else split.tensor, np.ones(len(split.tensor))
    for linear, share in zip(linears, widest or (1.0,) * len(linears), strict=False):
        inputs = linear.inputs / (ranks if linear.divided == "inputs" else ones)
        outputs = linear.outputs / (ranks if linear.divided == "outputs" else ones)
        yield _Matrix(inputs, outputs, here, of_expert, share)
