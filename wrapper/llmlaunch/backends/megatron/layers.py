"""The four layers in which Megatron checks a job, one after the other: each one later, and dearer to be refused by."""

from __future__ import annotations

__all__ = ["LAYERS", "layer_of"]

ARGUMENTS, CONFIG, GROUPS, RUN_TIME = LAYERS = ("arguments", "transformer config", "process groups", "run time")

# Files that are read before the first layer of the model is built; all others are at run time.
_EARLY = {
    "megatron/training/arguments.py": ARGUMENTS,
    "megatron/core/transformer/transformer_config.py": CONFIG,
    "megatron/core/transformer/pipeline_parallel_layer_layout.py": CONFIG,
    "megatron/core/model_parallel_config.py": CONFIG,
    "megatron/core/parallel_state.py": GROUPS,
}


def layer_of(where: str) -> str:
    """The layer of a rule that is checked in `where`: a file of Megatron's, and what stands after it."""
    return next((layer for file, layer in _EARLY.items() if where.startswith(file)), RUN_TIME)
