"""What llmlaunch refuses on purpose although Megatron accepts it, and the layers in which Megatron checks a job.

tests/frameworks/test_megatron_oracle.py shows each disagreement against the real Megatron core, and that there are no
others. docs/megatron-rules.md lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from llmlaunch.columns import BoolColumn
from llmlaunch.layout import Situation

# The four layers in which Megatron checks a job, one after the other: a later refusal costs more.
ARGUMENTS, CONFIG, GROUPS, RUN_TIME = LAYERS = ("arguments", "transformer config", "process groups", "run time")
# Files that are read before the first layer of the model is built; every other file is read at run time.
_EARLY = {
    "megatron/training/arguments.py": ARGUMENTS,
    "megatron/core/transformer/transformer_config.py": CONFIG,
    "megatron/core/transformer/pipeline_parallel_layer_layout.py": CONFIG,
    "megatron/core/model_parallel_config.py": CONFIG,
    "megatron/core/parallel_state.py": GROUPS,
}

MOST_DISAGREEMENTS = 20


def always(s: Situation) -> BoolColumn:
    return np.ones(len(s.layouts), dtype=np.bool_)


@dataclass(frozen=True)
class Disagreement:
    """`rule` is the key of the rule or requirement of ours that refuses; where `applies`, Megatron does what the
    `sentence` says instead, at `where`: file and line of megatron-core 0.19.2."""

    rule: str
    sentence: str
    where: str
    applies: Callable[[Situation], BoolColumn] = always


DISAGREEMENTS: tuple[Disagreement, ...] = (
    Disagreement(
        "sequence-needs-tensor",
        "Megatron switches sequence parallelism off and warns. A plan says what runs.",
        "megatron/training/arguments.py:1394",
    ),
    Disagreement(
        "stages-hold-some",
        "Megatron builds a stage without layers. Its devices would only pass on what they receive.",
        "megatron/core/transformer/pipeline_parallel_layer_layout.py:106",
    ),
    Disagreement(
        "recomputed-mlp-is-whole",
        "Megatron recomputes the MLP whole and never looks at the chunks. A plan says what runs.",
        "megatron/core/transformer/transformer_layer.py:882",
    ),
    Disagreement(
        "offload-modules-no-full",
        "Megatron takes both. What full recompute keeps is no module's input, so nothing is spared.",
        "megatron/core/transformer/transformer_config.py:1848",
    ),
    Disagreement(
        "instances-distributed",
        "With Megatron-FSDP the groups are those of its hybrid sharding, which is not priced.",
        "megatron/core/distributed/fsdp/mcore_fsdp_adapter.py:343",
        lambda s: np.greater_equal(s.layouts.zero_stage, 2),
    ),
    Disagreement(
        "latents-need-sequence",
        "Megatron trains, and says nothing of the gradients that it leaves out.",
        "megatron/core/transformer/multi_latent_attention.py:752",
    ),
    Disagreement(
        "sharded-one-stage",
        "Megatron trains, and writes checkpoints in which the layers of one stage stand for those of all.",
        "megatron/training/checkpointing.py:847",
    ),
)


def layer_of(where: str) -> str:
    """Return the layer that checks a rule, from the Megatron file the rule names first."""
    return next((layer for file, layer in _EARLY.items() if where.startswith(file)), RUN_TIME)
