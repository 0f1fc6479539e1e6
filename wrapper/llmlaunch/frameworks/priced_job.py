"""The job that the layouts of a recipe are priced as: by `check`, in a search, and from a record of a run."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.frameworks.base import Backend
from llmlaunch.memory.job import NO_CORRECTION, Correction, Job
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import Techniques
from llmlaunch.techniques.what_ifs import SOLVED_SHARE


def job_of(
    recipe: Recipe, backend: Backend, baseline_bytes: int | None = None, correction: Correction = NO_CORRECTION
) -> Job:
    """Return the job of a recipe. `baseline_bytes` replaces the context bytes of the facts: on a CPU, the measured
    resident memory of a trainer that has imported everything and is idle."""
    facts = backend.facts(recipe)
    if baseline_bytes is not None:
        facts = replace(facts, allocator=replace(facts.allocator, context_bytes=float(baseline_bytes)))
    on_cpu = recipe.cluster.accelerator.kind == "cpu"
    techniques = _without_offload(recipe.techniques) if on_cpu else recipe.techniques
    if techniques.swapped_share == SOLVED_SHARE:  # all of it, until a layout says how much
        techniques = replace(techniques, swapped_share=1.0)
    return Job(recipe.model, recipe.workload, facts, techniques=techniques, correction=correction)


def _without_offload(techniques: Techniques) -> Techniques:
    """On a CPU the host is the device, so nothing moves."""
    return replace(
        techniques,
        offload_modules=(),
        offload_checkpoints=False,
        offload_optimizer=0.0,
        offload_parameters=False,
        swapped_share=0.0,
    )
