"""Gradients and the buckets they are reduced in, from one micro-batch's backward to the end of the last."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.memory.facts import ByStage, GradientLife
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.weights import layer_parameters, matrices, rank_parameters

__all__ = ["Gradients", "by_stage", "gathered_parameters", "gradients", "unreduced_gradients"]


ALWAYS = GradientLife()


@dataclass(frozen=True)
class Gradients:
    """Bytes on one device: `lasting` from start to end, the others beside it, each at its moment: while the last
    micro-batch runs forward, while it begins backward, at the end of its backward, and in the optimizer step."""

    lasting: FloatColumn
    forward: FloatColumn
    backward: FloatColumn
    final: FloatColumn
    step: FloatColumn


def by_stage(table: ByStage, rows: RankColumns) -> FloatColumn:
    return np.asarray(table, dtype=np.float64)[rows.layouts.zero_stage]


def gradients(job: Job, rows: RankColumns, whole: FloatColumn, sharded: FloatColumn, group: FloatColumn) -> Gradients:
    """`whole` and `sharded` are parameters of the rank and their share of `group` devices. Without a `gradient_life`,
    what `gradient_bytes` says is there from start to end, and buckets as long as the activations are. With one, the
    buckets are ZeRO's: a single device makes and fills them too (counted on one rank, DeepSpeed 0.19.8)."""
    facts, stage = job.facts, rows.layouts.zero_stage
    life = facts.gradient_life or ALWAYS
    several = rows.microbatches > 1

    def bytes_of(table: ByStage, table_sharded: ByStage) -> FloatColumn:
        return by_stage(table, rows) * whole + by_stage(table_sharded, rows) * sharded

    alive = bytes_of(facts.backward_gradient_bytes, facts.backward_gradient_bytes_sharded)
    accumulated = np.where(several, bytes_of(life.accumulated, life.accumulated_sharded), 0.0)
    earlier = np.where(several, by_stage(life.earlier_sharded, rows) * sharded, 0.0)
    final = bytes_of(life.final, life.final_sharded)
    flat = by_stage(life.flattened, rows) * np.minimum(final, facts.flat_bucket_bytes)
    buckets = np.where(group > 1, facts.bucket_bytes, 0.0)
    before = buckets
    if facts.gradient_life is not None:  # made for good (3), or for every backward pass (1, 2)
        buckets = np.where(stage >= 1, facts.bucket_bytes, 0.0)
        before = np.where(stage >= 3, facts.bucket_bytes, 0.0)
    return Gradients(
        lasting=facts.gradient_bytes * np.where(stage >= 2, sharded, whole)
        + bytes_of(life.lasting, life.lasting_sharded),
        forward=alive + accumulated + before,
        backward=alive + accumulated + buckets,
        final=alive + final + earlier + buckets + flat,
        step=np.where(stage >= 3, facts.lasting_bucket_bytes, 0.0),
    )


def gathered_parameters(job: Job, rows: RankColumns, group: FloatColumn) -> FloatColumn:
    """Return the bytes of whole parameters alive beside the shards while a step runs forward and backward.

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
    """Return the bytes of whole gradients alive while a block runs backward: its own, those of blocks before it on
    their way through the reduction, and the head's, which is reduced with the root group at the end. Where a pipeline
    rank reduces once a step, its blocks accumulate whole gradients in the data type they are reduced in
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
    """Return the parameters of the largest layer of a row's rank, on one device."""
    dense, mixture, experts = layer_parameters(job, rows)
    return np.maximum(
        np.where(rows.dense_layers > 0, dense, 0.0), np.where(rows.moe_layers > 0, mixture + experts, 0.0)
    )


def _all_blocks(job: Job, rows: RankColumns) -> FloatColumn:
    dense, mixture, experts = layer_parameters(job, rows)
    return np.asarray(rows.dense_layers * dense + rows.moe_layers * (mixture + experts))
