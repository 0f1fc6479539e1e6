"""What the tracer is asked about one rank: the rendered job, without what lies on the cluster alone.

Megatron's own parser reads the arguments, so one that it does not take is refused in its own words.
"""

from __future__ import annotations

from typing import Any

from llmlaunch.backends.argument import NodeVariable, Word, flag_groups, flag_of
from llmlaunch.backends.base import Rendered
from llmlaunch.backends.megatron.alone import LEFT_OUT
from llmlaunch.recipe.types import Recipe

__all__ = ["traced_job"]

# The tokenizer's files lie on the cluster. What of it takes memory is the number of its words, which is said here.
TOKENIZER = frozenset(
    {"--tokenizer-type", "--tokenizer-model", "--vocab-size", "--padded-vocab-size", "--mock-data"}
    | {"--vocab-file", "--merge-file"}
)
DATA = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size")


def traced_job(recipe: Recipe, rendered: Rendered, pipeline_rank: int) -> dict[str, Any]:
    """A job as tracing/trace_ranks.py reads it, named by its rank. What no rank alone needs is left out, as on a GPU:
    checkpoints, datasets and what follows a training (backends/megatron/alone.py)."""
    _, *words = rendered.program  # the first is pretrain_gpt.py, whose work the tracer does
    kept = (group for group in flag_groups(words) if flag_of(group) not in LEFT_OUT.keys() | TOKENIZER)
    arguments = [_plain(word) for group in kept for word in group]
    return {
        "name": str(pipeline_rank),
        "world_size": recipe.world_size,
        "pipeline_rank": pipeline_rank,
        "arguments": [*arguments, *DATA, str(recipe.model.vocab_size)],
        "environment": dict(rendered.environment),
    }


def _plain(word: Word) -> str:
    """Nothing of such a word is read: it names a place on a node."""
    return f"${word.name}{word.suffix}" if isinstance(word, NodeVariable) else word
