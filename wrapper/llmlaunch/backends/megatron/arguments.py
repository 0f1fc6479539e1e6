"""The command line of Megatron-LM's `pretrain_gpt.py`, core 0.19.

Every flag here stands in the parser of megatron-core 0.19.2; unknown flags are fatal there, abbreviations too.
"""

from __future__ import annotations

from llmlaunch.backends.argument import Argument
from llmlaunch.backends.megatron.checkpoint_arguments import checkpoint_arguments
from llmlaunch.backends.megatron.data_arguments import data_arguments
from llmlaunch.backends.megatron.extra_words import refuse_contradictions
from llmlaunch.backends.megatron.model_arguments import model_arguments
from llmlaunch.backends.megatron.overlap import overlap_arguments
from llmlaunch.backends.megatron.parallel_arguments import parallel_arguments
from llmlaunch.backends.megatron.sharding import sharding_arguments
from llmlaunch.backends.megatron.techniques import technique_arguments
from llmlaunch.backends.megatron.training_arguments import training_arguments
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe

__all__ = ["planned_arguments"]


def planned_arguments(recipe: Recipe, layout: Layout) -> tuple[Argument, ...]:
    """All that stands after the script's name but `backend.extra_args`, each with what it follows from.

    Raises:
        UserError: `backend.extra_args` contradicts what is planned here (extra_words.py).
    """
    planned = (
        *model_arguments(recipe),
        *parallel_arguments(recipe.model, layout),
        *sharding_arguments(recipe, layout),
        *technique_arguments(recipe, layout),
        *overlap_arguments(recipe),
        *training_arguments(recipe, layout),
        *data_arguments(recipe, layout),
        *checkpoint_arguments(recipe, layout),
    )
    refuse_contradictions(recipe, planned)
    return planned
