"""Multi-token prediction: what its heads save on the last pipeline rank, for one micro-batch.

A head embeds the tokens, concatenates that with the hidden states, projects both to the hidden size and runs one more
layer like the last; then the outputs of all heads are concatenated with the decoder's, and one loss is computed after
the other (megatron/core/transformer/multi_token_prediction.py, core 0.19; traced).
"""

from __future__ import annotations

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.layout import RECOMPUTE_FULL
from llmlaunch.memory.activations import Kept, kept_by_layer, layer_input
from llmlaunch.memory.job import Job, RankColumns, by_recompute
from llmlaunch.memory.loss import table_gradient
from llmlaunch.memory.saved import saved_by_dense_layer, saved_by_mixture_layer, sequence_split, tokens

__all__ = ["embedded_again", "projection", "recomputed_head", "saved_by_heads", "tables_of_heads"]


def saved_by_heads(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes saved by the heads' layers and what surrounds them, after recompute.

    The concatenated outputs are there once, that of the decoder among them; each head but the first keeps its input
    besides, which is the output of another."""
    heads = job.shape.mtp_num_layers
    if not heads:
        return np.zeros(len(rows))
    around = _around_layer(job, rows)

    def left() -> FloatColumn:
        return _of_last_layer(job, kept_by_layer(job, rows)) + around

    def whole() -> FloatColumn:
        """Megatron core knows no block method for heads, and recomputes none."""
        return np.zeros(len(rows)) if _checkpointed(job) else _whole_layer(job, rows) + around

    per_head = by_recompute(rows, left, left, whole)
    outputs = (2.0 * heads) * _hidden(job, rows)
    return np.where(rows.last, heads * per_head + outputs, 0.0)


def recomputed_head(job: Job, rows: RankColumns) -> FloatColumn:
    """Return what full recompute recomputes around a head's layer, beside that layer."""
    if not job.shape.mtp_num_layers:
        return np.zeros(len(rows))
    again = rows.last & (rows.layouts.recompute == RECOMPUTE_FULL) & _checkpointed(job)
    return np.where(again, _around_layer(job, rows), 0.0)


def embedded_again(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the embeddings of all heads, each saved by a norm of its own."""
    heads = job.shape.mtp_num_layers
    return np.where(rows.last, heads * _hidden(job, rows), 0.0) if heads else np.zeros(len(rows))


def projection(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the elements of the matrix before a head's layer."""
    elements = 2.0 * job.shape.hidden_size**2 / rows.tensor
    return np.where(rows.last & (job.shape.mtp_num_layers > 0), elements, 0.0)


def tables_of_heads(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the gradients of the table on the last of several ranks: of one head, or of two on the way to their sum.
    No decoder layer has run backward by then."""
    tables = min(job.shape.mtp_num_layers, 2)
    return np.where(rows.last & ~rows.first, tables * table_gradient(job, rows), 0.0) if tables else np.zeros(len(rows))


def _hidden(job: Job, rows: RankColumns) -> FloatColumn:
    share = tokens(job, rows) / sequence_split(job, rows)
    return share * job.facts.activation_bytes * job.shape.hidden_size


def _of_last_layer(job: Job, of_kinds: Kept) -> FloatColumn:
    dense, mixture = of_kinds
    return mixture if job.shape.moe is not None and job.shape.moe.layer_pattern[-1] else dense


def _whole_layer(job: Job, rows: RankColumns) -> FloatColumn:
    dense = saved_by_dense_layer(job, rows).total
    mixture = dense if job.shape.moe is None else saved_by_mixture_layer(job, rows).total
    return _of_last_layer(job, (dense, mixture))


def _around_layer(job: Job, rows: RankColumns) -> FloatColumn:
    """The concatenation that is projected; the projection gathered over tensor ranks, of which the layer's input is
    a view; and the input of the norm behind the layer."""
    hidden = _hidden(job, rows)
    gathered = hidden * sequence_split(job, rows) - layer_input(job, rows)
    return 3.0 * hidden + gathered


def _checkpointed(job: Job) -> bool:
    return job.techniques.recompute_method != "block"
