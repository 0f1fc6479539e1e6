"""A layout's columns as the formulas use them: as floats, with the products that several formulas need."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.job import Job

__all__ = ["SplitColumns", "split_of"]


@dataclass(frozen=True)
class SplitColumns:
    """`layouts` as floats. `tokens` are those of one micro-batch on one context-parallel rank, `share` their part of
    one tensor-parallel rank (as matrices or the sequence are divided), `stream` those of the residual stream there:
    the share with sequence parallelism, else all of them."""

    layouts: LayoutColumns
    tensor: FloatColumn
    per_tensor: FloatColumn  # 1 / tensor
    context: FloatColumn
    data: FloatColumn
    pipeline: FloatColumn
    chunks: FloatColumn
    tokens: FloatColumn
    share: FloatColumn
    stream: FloatColumn

    def __len__(self) -> int:
        return len(self.tensor)


def split_of(job: Job, layouts: LayoutColumns) -> SplitColumns:
    """Return the columns of `layouts`, computed once for all formulas."""
    tensor = layouts.tensor.astype(np.float64)
    context = layouts.context.astype(np.float64)
    tokens = job.workload.sequence_length * layouts.micro_batch_size / context
    per_tensor = 1.0 / tensor
    share = tokens * per_tensor
    return SplitColumns(
        layouts,
        tensor,
        per_tensor,
        context,
        layouts.data.astype(np.float64),
        layouts.pipeline.astype(np.float64),
        layouts.virtual_pipeline.astype(np.float64),
        tokens,
        share,
        np.where(layouts.sequence_parallel > 0, share, tokens),
    )
