"""Which backend a recipe names."""

from __future__ import annotations

from llmlaunch.backends.base import Backend
from llmlaunch.recipe.types import Recipe

__all__ = ["BACKENDS", "backend_for", "recorded_name"]

BACKENDS = ("megatron-lm", "deepspeed")


def backend_for(recipe: Recipe) -> Backend:
    """The backend of a validated recipe; only that one is imported."""
    if recipe.backend.name == "deepspeed":
        from llmlaunch.backends.deepspeed.backend import DeepSpeed

        return DeepSpeed()
    from llmlaunch.backends.megatron.backend import MegatronLM

    return MegatronLM()


def recorded_name(recipe: Recipe) -> str:
    """What a measurement of the recipe says for its backend: Megatron-FSDP keeps other things in memory than the rest
    of Megatron-LM, and its measurements stand apart."""
    if recipe.backend.name == "megatron-lm":
        from llmlaunch.backends.megatron.sharding import asks_for_sharding

        return "megatron-fsdp" if asks_for_sharding(recipe) else recipe.backend.name
    return recipe.backend.name
