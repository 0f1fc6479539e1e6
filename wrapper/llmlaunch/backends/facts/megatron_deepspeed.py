"""What Megatron-DeepSpeed keeps in memory."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.backends.facts.megatron import MegatronOptions, megatron_facts
from llmlaunch.memory.facts import MemoryFacts

__all__ = ["megatron_deepspeed_facts"]


def megatron_deepspeed_facts(precision: str) -> MemoryFacts:
    """Megatron-DeepSpeed (BLOOM): DeepSpeed's FP16_Optimizer or BF16_Optimizer under Megatron's model. bf16 keeps
    fp32 accumulation beside the bf16 gradients (deepspeed/runtime/bf16_optimizer.py)."""
    base = megatron_facts(
        MegatronOptions(
            precision, precision, transformer_engine=False, gradient_accumulation_fusion=False, compute_capability=8.0
        )
    )
    accumulate = 4.0 if precision == "bf16" else 0.0
    return replace(
        base,
        backend="megatron-deepspeed",
        version="0.7",
        source="deepspeed/runtime/bf16_optimizer.py and zero/stage_1_and_2.py",
        gradient_bytes=base.gradient_bytes + accumulate,
        shard_over_context=False,
    )
