"""The priced layers of the ranks of a job, with what its techniques change of the tensors that they save."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from llmlaunch.layers.block import Saved
from llmlaunch.layers.columns import SPLIT_FIELDS_OF_A_LAYER, LayerColumns
from llmlaunch.layers.layer import Branch
from llmlaunch.layers.model import model_of
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.answers import once_for_rows, once_for_splits
from llmlaunch.memory.effects import Effect, effects_of
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.priced_layers import PricedLayers

# Rows below which the search for equal ones costs more than it spares (counted in NumPy calls: it takes about ten).
FEW_ROWS = 600


@once_for_rows
def layers_of(job: Job, rows: RankColumns) -> PricedLayers:
    """Return the layers of the ranks at `rows`, priced."""
    return _with_techniques(job, _whole_layers(job, rows), rows.layouts)


@once_for_splits
def _whole_layers(job: Job, rows: RankColumns) -> PricedLayers:
    """Return the layers of the ranks at `rows` whatever is recomputed and offloaded."""
    layouts, row_of = rows.layouts, None
    if len(rows) >= FEW_ROWS:
        layouts, row_of = layouts.distinct(SPLIT_FIELDS_OF_A_LAYER)
    return PricedLayers(model_of(job.shape), rows.groups, job_columns(job, layouts), row_of, partial(_saved, job))


def _with_techniques(job: Job, whole: PricedLayers, layouts: LayoutColumns) -> PricedLayers:
    """Return the same layers with what `job` and `layouts`, of the same splits, recompute and offload."""
    if whole.row_of is None:
        return _of_same_splits(whole, job_columns(job, layouts))
    recompute = layouts.recompute
    if layouts.modules is None and len(recompute) and recompute.min() == recompute.max():
        same = np.broadcast_to(recompute[0], len(whole.columns))
        return _of_same_splits(whole, job_columns(job, replace(whole.columns.layouts, recompute=same, modules=None)))
    names = ("recompute",) if layouts.modules is None else ("recompute", "modules")
    few, row_of = layouts.distinct((*SPLIT_FIELDS_OF_A_LAYER, *names))
    return replace(whole, columns=job_columns(job, few), row_of=row_of)


def _of_same_splits(whole: PricedLayers, columns: LayerColumns) -> PricedLayers:
    """Return the layers over the same few splits: what does not depend on the techniques is theirs, too."""
    return replace(whole, columns=replace(columns, whole=whole.columns), whole=whole)


def job_columns(job: Job, layouts: LayoutColumns) -> LayerColumns:
    """Return what blocks may look at of a job and its layouts."""
    columns = LayerColumns(job.facts, job.techniques, job.workload.sequence_length, layouts)
    for effect in effects_of(job, Effect.columns):
        columns = effect(columns)
    return columns


def _saved(job: Job, branch: Branch, c: LayerColumns) -> dict[str, Saved]:
    """Return what a branch saves."""
    tensors = branch.saved(c)
    for effect in effects_of(job, Effect.saved):
        tensors = effect(c, branch, tensors)
    return tensors
