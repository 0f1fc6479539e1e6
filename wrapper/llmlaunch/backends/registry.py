"""Which backend a recipe names."""

from __future__ import annotations

from llmlaunch.backends.base import Backend, RankAlone, Rendered
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe

__all__ = ["BACKENDS", "backend_for", "rank_alone", "recorded_name"]

BACKENDS = ("megatron-lm", "deepspeed")


def backend_for(recipe: Recipe) -> Backend:
    """The backend of a validated recipe; only that one is imported."""
    if recipe.backend.name == "deepspeed":
        from llmlaunch.backends.deepspeed.backend import DeepSpeed

        return DeepSpeed()
    from llmlaunch.backends.megatron.backend import MegatronLM

    return MegatronLM()


def rank_alone(recipe: Recipe, layout: Layout, rendered: Rendered, pipeline_rank: int, steps: int) -> RankAlone:
    """A pipeline rank of the rendered job by itself, for so many steps. Raises UserError where it cannot be."""
    if recipe.backend.name == "deepspeed":
        from llmlaunch.backends.deepspeed import rank_alone as deepspeed

        return deepspeed.rank_alone(recipe, layout, rendered, pipeline_rank, steps)
    from llmlaunch.backends.megatron import rank_alone as megatron

    return megatron.rank_alone(recipe, layout, rendered, pipeline_rank, steps)


def recorded_name(recipe: Recipe) -> str:
    """What a measurement of the recipe says for its backend: Megatron-FSDP keeps other things in memory than the rest
    of Megatron-LM, and its measurements stand apart."""
    if recipe.backend.name == "megatron-lm":
        from llmlaunch.backends.megatron.sharding import asks_for_sharding

        return "megatron-fsdp" if asks_for_sharding(recipe) else recipe.backend.name
    return recipe.backend.name
