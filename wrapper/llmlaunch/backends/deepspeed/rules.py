"""What DeepSpeed with ZeRO accepts, as data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmlaunch.backends.deepspeed.splits import SPLIT_RULES, TOGETHER
from llmlaunch.columns import BoolColumn
from llmlaunch.layout import RECOMPUTE_SELECTIVE, Rule, Situation

__all__ = ["ANY_RULES", "OWN_RULES", "RULES", "not_split"]

CONFIG = "deepspeed/runtime/config.py _batch_assertion, 0.19.8"
TRAINER = "llmlaunch/trainers/deepspeed/train.py"


def only(field: str) -> Callable[[Situation], BoolColumn]:
    """The layout field is 1."""

    def allows(s: Situation) -> BoolColumn:
        passes: BoolColumn = np.equal(getattr(s.layouts, field), 1)
        return passes

    return allows


def batch(s: Situation) -> BoolColumn:
    passes: BoolColumn = np.equal(s.workload.global_batch_size % (s.layouts.data * s.layouts.micro_batch_size), 0)
    return passes


def half_precision(s: Situation) -> BoolColumn:
    refused = s.workload.precision == "fp16" and s.cluster.accelerator.kind == "cpu"
    return np.full(len(s.layouts), not refused)


def sequence_parallel(s: Situation) -> BoolColumn:
    return np.equal(s.layouts.sequence_parallel, 0)


def no_selective(s: Situation) -> BoolColumn:
    return np.not_equal(s.layouts.recompute, RECOMPUTE_SELECTIVE)


def not_split(name: str, field: str, where: str = TRAINER) -> Rule:
    """The size must be 1."""
    sentence = f"the script has no {name} parallelism: its size must be 1 (Megatron-LM can split it)"
    return Rule(field.replace("_", "-"), sentence, where, only(field))


# Of every script.
ANY_RULES: tuple[Rule, ...] = (
    not_split("virtual pipeline", "virtual_pipeline"),
    not_split("expert", "expert"),
    not_split("expert tensor", "expert_tensor"),
    Rule(
        "sequence-parallel",
        "AutoTP leaves the sequence whole: sequence_parallel must be false (context splits it)",
        "deepspeed/module_inject/layers.py LinearLayer.forward, 0.19.8",
        sequence_parallel,
    ),
    Rule(
        "batch",
        "train_batch_size must be a multiple of train_micro_batch_size_per_gpu x data parallel size",
        CONFIG,
        batch,
    ),
    Rule(
        "fp16-needs-gpu",
        "fp16 needs a GPU; on a CPU use fp32 or bf16",
        "deepspeed/runtime/engine.py _do_sanity_check, 0.19.8",
        half_precision,
    ),
    Rule(
        "no-selective-recompute",
        "gradient checkpointing recomputes whole layers: recompute must be none or full",
        "transformers/modeling_utils.py gradient_checkpointing_enable, 5.23",
        no_selective,
        of_words=True,
    ),
)
# Of a script that has no stages: of its splits only that one of them is made is known.
OWN_RULES: tuple[Rule, ...] = (not_split("pipeline", "pipeline"), TOGETHER, *ANY_RULES)
# Of the shipped script, and of any that trains a Transformers model.
RULES: tuple[Rule, ...] = (not_split("pipeline", "pipeline"), *SPLIT_RULES, *ANY_RULES)
