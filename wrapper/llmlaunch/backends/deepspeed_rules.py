"""What DeepSpeed, as llmlaunch drives it, accepts, as data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from llmlaunch.layout import Rule, Situation

__all__ = ["RULES"]

Bools = NDArray[np.bool_]
OURS = "llmlaunch's DeepSpeed training script"
BATCH = "deepspeed/runtime/config.py _batch_assertion, 0.19"


def batch(s: Situation) -> Bools:
    return np.equal(s.workload.global_batch_size % (s.layouts.data * s.layouts.micro_batch_size), 0)


def only_one(field: str) -> Callable[[Situation], Bools]:
    def allows(s: Situation) -> Bools:
        return np.equal(getattr(s.layouts, field), 1)

    return allows


def no_selective(s: Situation) -> Bools:
    return np.not_equal(s.layouts.recompute, 1)


def no_sequence_parallel(s: Situation) -> Bools:
    return np.equal(s.layouts.sequence_parallel, 0)


RULES: tuple[Rule, ...] = (
    Rule("batch", "data parallel size x micro-batch size must divide the global batch size", BATCH, batch),
    *(
        Rule(
            field.replace("_", "-"), f"the job is split by data alone: {field.replace('_', ' ')} must be 1", OURS, only
        )
        for field, only in (
            (f, only_one(f)) for f in ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
        )
    ),
    Rule("sequence-parallel", "sequence parallelism needs tensor parallelism", OURS, no_sequence_parallel),
    Rule(
        "recompute-whole-layers",
        "Hugging Face models recompute whole layers or none (recompute: full or none)",
        "transformers/modeling_layers.py GradientCheckpointingLayer, 5.23",
        no_selective,
    ),
)
