"""The priced layers of the ranks of a job, with what its techniques change of the tensors that they save."""

from __future__ import annotations

from functools import partial

from llmlaunch.layers.block import Saved
from llmlaunch.layers.columns import SPLIT_FIELDS_OF_A_LAYER, LayerColumns
from llmlaunch.layers.layer import Branch
from llmlaunch.layers.model import model_of
from llmlaunch.memory.answers import once_for_rows
from llmlaunch.memory.effects import Effect, effects_of
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.priced_layers import PricedLayers, job_columns

__all__ = ["layers_of"]

# Rows below which the search for equal ones costs more than it spares (counted in NumPy calls: it takes about ten).
FEW_ROWS = 600


def layers_of(job: Job, rows: RankColumns) -> PricedLayers:
    """Return the layers of the ranks at `rows`, priced. The rows carry the answer, so it is gone with them."""
    known: tuple[Job, PricedLayers] | None = vars(rows).get("layers_now")
    if known is not None and known[0] is job:
        return known[1]
    whole = _whole_layers(job, rows)
    layers = whole.with_techniques(job, rows.layouts)
    vars(rows)["layers_now"] = (job, layers)
    return layers


@once_for_rows
def _whole_layers(job: Job, rows: RankColumns) -> PricedLayers:
    """Return the layers of the ranks at `rows` whatever is recomputed and offloaded."""
    layouts, row_of = rows.layouts, None
    if len(rows) >= FEW_ROWS:
        layouts, row_of = layouts.distinct(SPLIT_FIELDS_OF_A_LAYER)
    return PricedLayers(model_of(job.shape), rows.groups, job_columns(job, layouts), row_of, partial(_saved, job))


def _saved(job: Job, branch: Branch, c: LayerColumns) -> dict[str, Saved]:
    """Return what a branch saves."""
    tensors = branch.saved(c)
    for effect in effects_of(job, Effect.saved):
        tensors = effect(c, branch, tensors)
    return tensors
