"""Gradients and the buckets they are reduced in, from one micro-batch's backward to the end of the last."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.memory.facts import ByStage, GradientLife
from llmlaunch.memory.job import Job, RankColumns

__all__ = ["Gradients", "by_stage", "gradients"]

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
