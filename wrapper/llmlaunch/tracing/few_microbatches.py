"""As few micro-batches as show the peak of many.

Every schedule of Megatron core has a warm-up of forward passes, a steady part of one forward and one backward pass at a
time, and a cool-down of backward passes (megatron/core/pipeline_parallel/schedules.py get_pp_rank_microbatches, core
0.19). The steady part holds the same number of micro-batches all along, and repeats: without interleaving after each
micro-batch, with it after each group of them has passed all chunks. One whole period of it, and one pass more for which
it receives, shows all there is, but for the numbers of the loss that the last stage keeps of every micro-batch (512
bytes each).
"""

from __future__ import annotations

from typing import Any

STEADY = 2  # more of a schedule whose period is one micro-batch


def enough_microbatches(args: Any, pipeline_rank: int) -> int:
    """The fewest micro-batches that run the warm-up, one period of the steady part and one pass more on this rank.

    `args` are Megatron's, validated.
    """
    stages, chunks, group = _shape(args)
    if chunks == 1:
        return stages - pipeline_rank + STEADY + _overlaps(args)
    passes = _warm_up_passes(args, pipeline_rank) + group * chunks + 1
    return _whole_groups(passes, chunks, group)


def full_microbatches(args: Any, pipeline_rank: int) -> int:
    """The fewest that have as many in flight as there ever are."""
    stages, chunks, group = _shape(args)
    if chunks == 1:
        return stages - pipeline_rank + _overlaps(args)
    return _whole_groups(_warm_up_passes(args, pipeline_rank) + 1, chunks, group)


def _shape(args: Any) -> tuple[int, int, int]:
    stages = args.pipeline_model_parallel_size
    chunks = args.virtual_pipeline_model_parallel_size or 1
    return stages, chunks, getattr(args, "microbatch_group_size_per_vp_stage", None) or stages


def _warm_up_passes(args: Any, pipeline_rank: int) -> int:
    stages, chunks, group = _shape(args)
    passes = (stages - pipeline_rank - 1) * 2 + (chunks - 1) * group
    return passes + _overlaps(args)


def _overlaps(args: Any) -> int:
    """1 where the forward pass of one micro-batch runs beside the backward pass of another, layer by layer."""
    return int(bool(getattr(args, "overlap_moe_expert_parallel_comm", False)))


def _whole_groups(passes: int, chunks: int, group: int) -> int:
    return -(-passes // (chunks * group)) * group
