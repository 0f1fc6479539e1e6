"""Parameters gathered and gradients not yet reduced where every block is sharded (FSDP)."""

from __future__ import annotations

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.weights import layer_parameters, matrices, rank_parameters

__all__ = ["gathered_parameters", "unreduced_gradients"]


def gathered_parameters(job: Job, rows: RankColumns, group: FloatColumn) -> FloatColumn:
    """Bytes of whole parameters alive beside the shards while a step runs forward and backward.

    A root group (embedding, final norm, head) is not released after the forward pass: torch.distributed.fsdp,
    `_fully_shard/_fsdp_state.py` (root) and `_runtime_utils.py` `_post_forward_reshard`, 2.13; Megatron-FSDP releases
    unit modules alone (megatron_fsdp.py `_post_forward`, core 0.19).
    """
    sharding = job.facts.full_sharding
    if sharding is None:
        return np.zeros(len(rows))
    blocks, block = _all_blocks(job, rows), _block(job, rows)
    ahead = np.ceil(sharding.gathered_elements / np.maximum(block, 1.0)) * block
    some = np.minimum(blocks, np.maximum(sharding.gathered_blocks * block, block + ahead))
    whole = (rows.layouts.zero_stage < 3) | (sharding.keeps_stage & (rows.layouts.pipeline > 1))
    counts = rank_parameters(job, rows)
    root = counts.dense + counts.expert - blocks
    alive = sharding.gathered_bytes * np.where(whole, blocks, some) + sharding.root_bytes * root
    return np.where((rows.layouts.zero_stage >= sharding.first_stage) & (group > 1), alive, 0.0)


def unreduced_gradients(job: Job, rows: RankColumns, group: FloatColumn) -> FloatColumn:
    """Bytes of whole gradients alive while a block runs backward: its own, those of blocks before it on their way
    through the reduction, and the head's, which is reduced with the root group at the end. Where a pipeline rank
    reduces once a step, its blocks accumulate whole gradients in the data type they are reduced in
    (`_fsdp_param.py` `to_accumulated_grad_if_needed`, torch 2.13)."""
    sharding = job.facts.full_sharding
    if sharding is None:
        return np.zeros(len(rows))
    blocks, block = _all_blocks(job, rows), _block(job, rows)
    waiting = np.minimum(blocks, np.maximum(sharding.reduced_blocks * block, sharding.reduced_elements))
    accumulated = sharding.keeps_stage & (rows.layouts.pipeline > 1) & (rows.microbatches > 1)
    reduced = sharding.reduced_bytes * np.where(accumulated, blocks, waiting)
    alive = sharding.gradient_bytes * (block + matrices(job, rows).head) + reduced
    return np.where((rows.layouts.zero_stage >= 2) & (group > 1), alive, 0.0)


def _block(job: Job, rows: RankColumns) -> FloatColumn:
    """Parameters of the largest layer a row's rank holds, on one device."""
    dense, mixture, experts = layer_parameters(job, rows)
    return np.maximum(
        np.where(rows.dense_layers > 0, dense, 0.0), np.where(rows.moe_layers > 0, mixture + experts, 0.0)
    )


def _all_blocks(job: Job, rows: RankColumns) -> FloatColumn:
    dense, mixture, experts = layer_parameters(job, rows)
    return np.asarray(rows.dense_layers * dense + rows.moe_layers * (mixture + experts))
