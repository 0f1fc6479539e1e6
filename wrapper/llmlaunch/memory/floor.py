"""A floor under every cut of the layers: what the fullest pipeline rank has at least."""

from __future__ import annotations

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.job import Job, all_ranks
from llmlaunch.memory.states import states

__all__ = ["least_bytes"]

ROUNDING_BYTES = 8.0


def least_bytes(job: Job, layouts: LayoutColumns) -> FloatColumn:
    """Device bytes of the fullest rank, however the layers are cut: no less than the mean over all ranks of parameters,
    gradients and optimizer states, which grow with the layers alone and are all there when the optimizer runs. Reads
    what `held_fields` names; with ZeRO 3 parameters are gathered, and nothing is said (0)."""
    rows = all_ranks(job, layouts)
    state = states(job, rows)
    held = state.parameters + state.weight_copies + state.gradients + state.optimizer
    mean = np.bincount(rows.layout_index, weights=held, minlength=len(layouts)) / layouts.pipeline
    factor = job.correction.torch_factor
    torch = np.maximum(mean * factor - ROUNDING_BYTES * max(factor, 1.0), 0.0)
    outside = max(job.facts.context_bytes + job.correction.outside_bytes, 0.0)
    return np.where(layouts.zero_stage < 3, torch + outside, 0.0)
