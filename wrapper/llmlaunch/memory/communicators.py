"""Process groups a device communicates in; each of more than one rank holds a communicator with buffers of its own.

PyTorch makes an NCCL communicator at a group's first collective, and one for every pair of ranks that send to each
other (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, getNCCLComm). A framework that builds two groups of the same
ranks therefore pays twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.job import Job, RankColumns

__all__ = ["GROUPS", "communicators"]

Members = Callable[[RankColumns], FloatColumn]


def _neighbours(rows: RankColumns) -> FloatColumn:
    return (~rows.first).astype(np.float64) + (~rows.last)


def _tied_ends(rows: RankColumns) -> FloatColumn:
    return ((rows.first | rows.last) & (rows.layouts.pipeline > 1)).astype(np.float64)


def _several(size: Callable[[LayoutColumns], IntColumn]) -> Members:
    return lambda rows: (size(rows.layouts) > 1).astype(np.float64)


# How many communicators of each kind a row's rank holds.
GROUPS: Mapping[str, Members] = {
    "world": _several(lambda lay: lay.tensor * lay.pipeline * lay.context * lay.data),
    "tensor": _several(lambda lay: lay.tensor),
    "pipeline": _several(lambda lay: lay.pipeline),
    "context": _several(lambda lay: lay.context),
    "data": _several(lambda lay: lay.data),
    "expert": _several(lambda lay: lay.expert),
    "data_and_context": _several(lambda lay: np.minimum(lay.data, lay.context)),
    "model": _several(lambda lay: lay.tensor * lay.pipeline),
    # the shares of a stage's output are gathered only where there is another stage
    "stage_output": _several(lambda lay: np.minimum(lay.tensor, lay.pipeline)),
    "neighbours": _neighbours,
    "tied_embeddings": _tied_ends,
}


def communicators(job: Job, rows: RankColumns) -> FloatColumn:
    """Bytes of all communicators of each row's rank."""
    count = np.zeros(len(rows))
    for name in job.facts.groups:
        held = GROUPS[name](rows)
        count = count + (held if name != "tied_embeddings" or job.shape.tied_embeddings else 0.0)
    return job.facts.communicator_bytes * count
