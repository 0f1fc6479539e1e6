"""Parameters that each pipeline rank holds on one device, and the matrices among them. Dense parameters and those of
experts are kept apart, because they are sharded differently.

Counts follow Megatron core 0.19: attention and MLP matrices are split over tensor parallelism, experts over expert
and expert-tensor parallelism, norms and routers are whole on every device, and tied embeddings exist a second time
on the last of several stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import reduce

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.block import Parameters, Tensors
from llmlaunch.layers.columns import Size
from llmlaunch.layers.layer import Layer
from llmlaunch.layers.matrix import Matrix
from llmlaunch.layers.model import model_of, stream_contraction
from llmlaunch.memory.answers import once_for_splits
from llmlaunch.memory.effects import Effect, effects_of, trains_all
from llmlaunch.memory.job import Job, RankColumns, final_norm_rank, head_rank
from llmlaunch.memory.layer_bytes import layers_of
from llmlaunch.models.shape import ModelShape


@frozen
class RankParameters:
    """Parameter counts on one device. `largest_layer` is what ZeRO 3 must gather at once."""

    dense: FloatColumn
    expert: FloatColumn
    largest_layer: FloatColumn


@once_for_splits
def vocabulary(job: Job, rows: RankColumns) -> FloatColumn:
    """Rows of the embedding table, padded as the backend pads them, before the division by tensor."""
    if not job.facts.states.pad_vocabulary:
        return np.full(len(rows), float(job.shape.vocab_size))
    multiple = 128.0 * rows.tensor
    return np.ceil(job.shape.vocab_size / multiple) * multiple


@once_for_splits
def layer_parameters(job: Job, rows: RankColumns) -> tuple[list[FloatColumn], list[FloatColumn]]:
    """Return the (dense, expert) parameters of a layer of each group on one device."""
    layers = layers_of(job, rows)
    dense, expert = ([getattr(each, name) for each in layers.parameters] for name in ("dense", "expert"))
    return layers.by_group(dense), layers.by_group(expert)


@once_for_splits
def tables(job: Job, rows: RankColumns) -> tuple[FloatColumn, FloatColumn]:
    """Return the elements of the embedding table and of the head on one device."""
    whole = vocabulary(job, rows) * job.shape.hidden_size
    split = whole / rows.tensor
    embedding = whole if job.facts.states.embedding_whole else split
    return embedding, embedding if job.shape.tied_embeddings else split


@once_for_splits
def rank_parameters(job: Job, rows: RankColumns) -> RankParameters:
    """Return the parameters on one device of each row's pipeline rank."""
    shape, lay = job.shape, rows.layouts
    dense_layers, expert_layers = layer_parameters(job, rows)
    embedding, head = tables(job, rows)
    dense, expert = rows.sum_of(dense_layers), rows.sum_of(expert_layers)
    first = embedding + (shape.max_position_embeddings * shape.hidden_size if _learned(shape) else 0.0)
    second_table = np.where(lay.pipeline > 1, head, 0.0) if shape.tied_embeddings else head
    norm = np.equal(rows.rank, final_norm_rank(job, lay)) * (shape.norm_parameters + stream_contraction(shape))
    if shape.mtp_num_layers:
        heads, extra = np.equal(rows.rank, head_rank(job, lay)), _prediction_modules(job, rows)
        apart = job.techniques.heads_before_loss or not shape.tied_embeddings
        dense = dense + heads * (extra.dense + np.where((lay.pipeline > 1) & apart, first, 0.0))
        expert = expert + heads * extra.expert
    dense = dense + rows.first * first + rows.last * second_table + norm
    if shape.vision is not None:
        from llmlaunch.memory.vision import rank_encoder

        dense = dense + rank_encoder(job, rows)
    largest = rows.most_of([each + experts for each, experts in zip(dense_layers, expert_layers, strict=True)])
    return RankParameters(dense, expert, np.maximum(largest, embedding))


def _learned(shape: ModelShape) -> bool:
    return shape.position_embedding.startswith("learned_absolute")


def _prediction_modules(job: Job, rows: RankColumns) -> Parameters:
    """Multi-token-prediction modules: their layers, a 2h x h projection, three norms
    (megatron/core/transformer/multi_token_prediction.py, core 0.19). They embed tokens, so that their one of several
    stages has a table of its own (models/gpt/gpt_model.py GPTModel.__init__), unless the head's is one already."""
    shape, layers = job.shape, layers_of(job, rows)
    dense, expert = (
        layers.predicted([getattr(each, name) for each in layers.parameters]) for name in ("dense", "expert")
    )
    projection = 2.0 * shape.hidden_size**2 / rows.layouts.tensor
    around = projection + 3.0 * shape.norm_parameters + stream_contraction(shape)
    return Parameters(shape.mtp_modules * (dense + around), shape.mtp_modules * expert)


@once_for_splits
def head_matrix(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the elements of the head on one device: on the last rank alone."""
    return np.where(rows.last, tables(job, rows)[1], 0.0)


@once_for_splits
def distinct_matrices(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the elements of the weight matrices on a rank whose shapes differ, each once, whichever block has it, and
    of the head."""
    layers = layers_of(job, rows)
    total = np.zeros(len(rows))
    earlier: list[tuple[Size, Size, BoolColumn]] = []
    for matrix, here in _matrices_here(job, rows):
        if not matrix.linear:
            continue
        inputs, outputs = matrix.inputs_on_device(layers.columns), matrix.outputs_on_device(layers.columns)
        new = here
        for other_inputs, other_outputs, there in earlier:
            alike = np.asarray(np.equal(inputs, other_inputs) & np.equal(outputs, other_outputs))
            if alike.any():
                new = new & ~(there & (layers.of_ranks(alike.astype(np.float64)) > 0))
        total = total + np.where(new, layers.of_ranks(inputs * outputs), 0.0)
        earlier.append((inputs, outputs, here))
    total = total + head_matrix(job, rows)
    if job.shape.vision is None:
        return total
    from llmlaunch.memory.vision import encoder_matrices

    return total + encoder_matrices(job, rows)


def _matrices_here(job: Job, rows: RankColumns) -> Iterator[tuple[Matrix, BoolColumn]]:
    """Yield the different matrices of the model's layers, and which ranks have a layer with each."""
    model = model_of(job.shape)
    with_heads = np.equal(rows.rank, head_rank(job, rows.layouts))
    held: list[BoolColumn] = []
    for kind in range(len(model.kinds)):
        holds = np.zeros(len(rows), dtype=np.bool_)
        for kinds, count in zip(rows.groups, rows.counts, strict=True):
            holds = holds | (count > 0) if kind in kinds else holds
        held.append(holds | with_heads if kind in model.predicts else holds)
    for matrix, of_kinds in model.matrices:
        yield matrix, reduce(np.logical_or, (held[kind] for kind in of_kinds))


@once_for_splits
def largest_matrices(job: Job, rows: RankColumns) -> tuple[FloatColumn, FloatColumn]:
    """Return the elements of the largest matrix of a rank's layers outside experts, and of the first or second matrices
    of all experts of a device together; 0 where the rank has none. Where a framework keeps projections apart that
    another fuses, each counts alone, except those of experts."""
    layers = layers_of(job, rows)
    c, dense, expert = layers.columns, np.zeros(len(rows)), np.zeros(len(rows))
    for matrix, here in _matrices_here(job, rows):
        if matrix.of_experts:
            size = layers.of_ranks(matrix.count_on_device(c) * matrix.elements_on_device(c))
            expert = np.maximum(expert, np.where(here, size, 0.0))
        elif matrix.linear:
            widest = max((part.columns for part in matrix.parts), default=0.0) / matrix.outputs
            share = widest if job.facts.states.projections_apart else 1.0
            dense = np.maximum(dense, np.where(here, share * layers.of_ranks(matrix.elements_on_device(c)), 0.0))
    return dense, expert


@once_for_splits
def largest_parameter(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the elements of the largest single parameter that a device has, the embedding and the head included; the
    experts of a device count as one."""
    (dense, experts), (embedding, head) = largest_matrices(job, rows), tables(job, rows)
    table = np.where(rows.first, embedding, np.where(rows.last, head, 0.0))
    if job.techniques.heads_before_loss:
        table = np.where(np.equal(rows.rank, head_rank(job, rows.layouts)), embedding, table)
    return np.maximum(np.maximum(dense, experts), table)


@once_for_splits
def linear_weights(job: Job, rows: RankColumns) -> tuple[list[FloatColumn], list[FloatColumn]]:
    """Return the (dense, expert) weights of a layer's linear layers on one device, by group: what a narrower number
    format is applied to (not the embedding, the head and the router)."""
    layers = layers_of(job, rows)
    c = layers.columns

    def weights(of_experts: bool) -> list[FloatColumn]:
        def of_layer(layer: Layer, tensors: Tensors) -> Size:
            chosen = (each for each in layer.matrices if each.narrow and each.of_experts == of_experts)
            return sum((each.count_on_device(c) * each.elements_on_device(c) for each in chosen), 0.0)

        return layers.by_group(layers.each(of_layer))

    return weights(of_experts=False), weights(of_experts=True)


def trained_parameters(job: Job, rows: RankColumns, counts: RankParameters) -> RankParameters:
    """Parameters with a gradient and optimizer states, of all on the device."""
    dense, expert = counts.dense, counts.expert
    if job.shape.vision is not None and trains_all(job):
        from llmlaunch.memory.vision import rank_encoder

        dense = dense - (rank_encoder(job, rows) - rank_encoder(job, rows, trained=True))
    for effect in effects_of(job, Effect.trained_parameters):
        dense, expert = effect(job, rows, dense, expert)
    return replace(counts, dense=dense, expert=expert)


def added_parameters(job: Job, rows: RankColumns) -> tuple[FloatColumn, FloatColumn]:
    """Return the (dense, expert) parameters on a device that techniques add to those of the model."""
    added = [effect(job, rows) for effect in effects_of(job, Effect.added_parameters)]
    none = np.zeros(len(rows))
    return sum((dense for dense, _ in added), none), sum((expert for _, expert in added), none)
