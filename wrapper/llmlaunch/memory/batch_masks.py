"""The attention mask of sequence x sequence bytes that comes with every sequence of a batch, where the loader makes
masks: on the device of every rank that gets batches."""

from __future__ import annotations

from functools import reduce

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn
from llmlaunch.memory.effects import Effect, effects_of
from llmlaunch.memory.heads import head_rank
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.schedule import in_flight

__all__ = ["arriving_mask", "kept_masks", "loads_batches"]

Terms = dict[str, FloatColumn]
TERM = "attention_masks"


def loads_batches(job: Job, rows: RankColumns) -> BoolColumn:
    """Return whether each row's rank gets the tokens of a batch: the first and the last pipeline rank, and that of
    prediction heads (megatron/core/utils.py get_batch_on_this_tp_rank, core 0.19)."""
    return np.asarray(rows.first | rows.last | np.equal(rows.rank, head_rank(job, rows.layouts)))


def kept_masks(job: Job, rows: RankColumns) -> Terms:
    """Return the masks that are kept for the backward pass, one for each micro-batch in flight, where a technique keeps
    what its layers read."""
    if not job.facts.host.loader_mask:
        return {}
    return {TERM: np.where(_keeps(job, rows), _share(job, rows) * in_flight(job, rows).depth, 0.0)}


def arriving_mask(job: Job, rows: RankColumns, freed: FloatColumn) -> Terms:
    """Return the masks that are there until the loss is computed: those that are kept and that of the micro-batch that
    runs forward, or what is more of it when it arrives, `freed` bytes before the loss.

    Every tensor rank has it whole, then context parallelism copies its share of the rows
    (megatron/core/utils.py get_batch_on_this_tp_rank and _get_batch_on_this_cp_rank_per_sequence_balancing, core 0.19).
    """
    if not job.facts.host.loader_mask:
        return {}
    share = _share(job, rows)
    whole = share * rows.layouts.context
    arrives = np.where(rows.layouts.context > 1, whole + share, whole)
    kept = kept_masks(job, rows)[TERM]
    earlier = np.where(_keeps(job, rows), kept - share, 0.0)
    return {TERM: earlier + np.maximum(share, arrives - freed)}


def _share(job: Job, rows: RankColumns) -> FloatColumn:
    lay, length = rows.layouts, float(job.workload.sequence_length)
    return np.where(loads_batches(job, rows), lay.micro_batch_size * length**2 / lay.context, 0.0)


def _keeps(job: Job, rows: RankColumns) -> BoolColumn:
    kept = (effect(job, rows) for effect in effects_of(job, Effect.keeps_inputs))
    return reduce(np.logical_or, kept, np.zeros(len(rows), dtype=np.bool_))
