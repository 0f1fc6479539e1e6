"""Which backend a recipe names."""

from __future__ import annotations

from llmlaunch.backends.base import Backend
from llmlaunch.recipe.types import Recipe

__all__ = ["BACKENDS", "backend_for"]

BACKENDS = ("megatron-lm", "deepspeed")


def backend_for(recipe: Recipe) -> Backend:
    """The backend of a validated recipe; only that one is imported."""
    if recipe.backend.name == "deepspeed":
        from llmlaunch.backends.deepspeed.backend import DeepSpeed

        return DeepSpeed()
    from llmlaunch.backends.megatron.backend import MegatronLM

    return MegatronLM()
