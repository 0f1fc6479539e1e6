"""What the layers of a model save for one micro-batch, as the memory tests ask for it."""

from __future__ import annotations

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.layers.block import Block
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.layer_bytes import layers_of


def _kinds(job: Job, rows: RankColumns, mixture: bool, block: type[Block]) -> list[int]:
    """Return the kinds of decoder layers that are mixtures, or not, and have such a block. They save the same."""
    layers = layers_of(job, rows)
    kinds = [kind for kind in layers.model.classes[mixture] if any(layers.model.kinds[kind].blocks_of(block))]
    assert all(np.array_equal(layers.totals[kind], layers.totals[kinds[0]]) for kind in kinds), "layers differ"
    return kinds


def layer_tensors(
    job: Job, rows: RankColumns, mixture: bool = False, block: type[Block] = Block
) -> dict[str, FloatColumn]:
    """Return the bytes of each tensor that a layer saves which is a mixture, or none, and has such a block."""
    layers, kind = layers_of(job, rows), _kinds(job, rows, mixture, block)[0]
    return {name: layers.of_ranks(tensor.bytes) for name, tensor in layers.tensors[kind].items()}


def dense_layer(job: Job, rows: RankColumns, block: type[Block] = Block) -> FloatColumn:
    """Return all bytes that a layer saves which is no mixture and has such a block."""
    layers = layers_of(job, rows)
    return layers.of_ranks(layers.totals[_kinds(job, rows, False, block)[0]])


def mixture_layer(job: Job, rows: RankColumns) -> FloatColumn:
    """Return all bytes that a layer saves which is a mixture."""
    layers = layers_of(job, rows)
    return layers.of_ranks(layers.totals[_kinds(job, rows, True, Block)[0]])


def rank_layers(job: Job, rows: RankColumns) -> FloatColumn:
    """Return all bytes that the layers of each rank save together."""
    layers = layers_of(job, rows)
    return rows.sum_of(layers.by_group(layers.totals))


def rank_tensors(job: Job, rows: RankColumns, *prefixes: str) -> FloatColumn:
    """Return the bytes of the tensors that the layers of each rank save together and whose names begin with one of
    the `prefixes`."""
    layers = layers_of(job, rows)
    of_kinds = [sum(each.bytes for name, each in kind.items() if name.startswith(prefixes)) for kind in layers.tensors]
    return rows.sum_of(layers.by_group(of_kinds))
