"""Where prediction heads lie, and the norm behind the decoder with them, and which layers they have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llmlaunch.columns import IntColumn
from llmlaunch.frozen import frozen
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.job import Job, RankColumns, parts_differ
from llmlaunch.models.kinds import attention_kinds, head_kinds, is_mixed, layer_parts, part_kinds
from llmlaunch.models.mamba import PARTS

__all__ = ["HeadLayers", "final_norm_rank", "head_layers", "head_rank"]


@frozen
class HeadLayers:
    """The layers of one multi-token-prediction module: how many are dense and how many mixtures, and `rows` as if all
    layers had the parts of these."""

    rows: RankColumns
    dense: int
    mixture: int


def head_layers(job: Job, rows: RankColumns) -> HeadLayers:
    """Return the layers of a multi-token-prediction module (`head_kinds`), with the kind of softmax attention that they
    have by themselves."""
    shape, (dense, mixture) = job.shape, head_kinds(job.shape)
    if is_mixed(shape):
        of_heads = [float(kind.predicts) for kind in attention_kinds(shape)]
        rows = replace(rows, kind_shares=tuple(np.full(len(rows), share) for share in of_heads))
    if not parts_differ(shape):
        return HeadLayers(rows, dense, mixture)
    parts = [PARTS[letter] for letter in shape.mamba.mtp_pattern or ""] if shape.mamba else [layer_parts(shape)[-1]]
    shares = {kind: parts.count(kind) / max(dense, 1) for kind in part_kinds(shape)}
    alike = replace(rows, shares={kind: np.full(len(rows), share) for kind, share in shares.items()})
    return HeadLayers(alike, dense, mixture)


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
