"""Where prediction heads lie, and the norm behind the decoder with them."""

from __future__ import annotations

import numpy as np

from llmlaunch.columns import IntColumn
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.job import Job

__all__ = ["final_norm_rank", "head_rank"]


def head_rank(job: Job, layouts: LayoutColumns) -> IntColumn:
    """Return the pipeline rank that holds the layers of multi-token prediction."""
    return layouts.pipeline - 1 - int(job.techniques.heads_before_loss)


def final_norm_rank(job: Job, layouts: LayoutColumns) -> IntColumn:
    """Return the pipeline rank that holds the norm behind the decoder: the last, and where prediction heads lie before
    it, that of the last decoder layer (megatron/core/transformer/transformer_block.py TransformerBlock
    has_final_layernorm_in_this_stage, core 0.19)."""
    if not job.techniques.heads_before_loss:
        return layouts.pipeline - 1
    stages = [max((stage for stage, layers in enumerate(split) if layers), default=0) for split in layouts.partitions]
    return np.array(stages, dtype=np.int64)[layouts.partition] % layouts.pipeline
