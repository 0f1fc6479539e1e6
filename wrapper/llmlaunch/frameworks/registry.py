"""Which backend a recipe names."""

from __future__ import annotations

from llmlaunch.frameworks.base import Backend, OmittedTechnique, RankAlone, Rendered
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe

__all__ = ["backend_for", "omitted_alone", "rank_alone", "recorded_name", "timed_name"]


def backend_for(recipe: Recipe) -> Backend:
    """Return the backend of a validated recipe; the modules of the others are not imported."""
    if recipe.backend.name == "deepspeed":
        from llmlaunch.frameworks.deepspeed.backend import DeepSpeed

        return DeepSpeed()
    if recipe.backend.name == "megatron-bridge":
        from llmlaunch.frameworks.bridge.backend import MegatronBridge

        return MegatronBridge()
    from llmlaunch.frameworks.megatron.backend import MegatronLM

    return MegatronLM()


def rank_alone(recipe: Recipe, layout: Layout, rendered: Rendered, pipeline_rank: int, steps: int) -> RankAlone:
    """Return one pipeline rank of the rendered job as a program of its own that runs `steps` steps.

    Raises UserError for a rank or a job that cannot run alone.
    """
    if recipe.backend.name == "deepspeed":
        from llmlaunch.frameworks.deepspeed import rank_alone as deepspeed

        return deepspeed.rank_alone(recipe, layout, rendered, pipeline_rank, steps)
    from llmlaunch.frameworks.megatron import rank_alone as megatron

    return megatron.rank_alone(recipe, layout, rendered, pipeline_rank, steps)


def omitted_alone(recipe: Recipe, traced: bool) -> tuple[OmittedTechnique, ...]:
    """Return the techniques of a planned recipe that one rank alone runs without: on a GPU, or `traced`."""
    if recipe.backend.name == "deepspeed":
        return ()
    from llmlaunch.frameworks.megatron import rank_alone as megatron

    return megatron.omitted_techniques(recipe, traced)


def recorded_name(recipe: Recipe) -> str:
    """Return the backend name for measurement records: "megatron-fsdp" is recorded apart from "megatron-lm", because it
    keeps other things in memory."""
    if recipe.backend.name == "megatron-lm":
        from llmlaunch.frameworks.megatron.sharding import asks_for_sharding

        return "megatron-fsdp" if asks_for_sharding(recipe) else recipe.backend.name
    return recipe.backend.name


def timed_name(recipe: Recipe) -> str:
    """Return the backend by which step times are told apart: `recorded_name`, and the kind of script where DeepSpeed
    does not train a Hugging Face model."""
    name, kind = recorded_name(recipe), recipe.backend.script_kind
    if name != "deepspeed":
        return name
    from llmlaunch.frameworks.deepspeed.facts import HUGGING_FACE_KINDS

    return name if kind in HUGGING_FACE_KINDS else kind
