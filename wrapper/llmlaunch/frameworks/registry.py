"""Which framework a recipe names, and what is asked of it by recipe."""

from __future__ import annotations

from importlib import import_module

from llmlaunch.frameworks.base import Backend, OmittedTechnique, RankAlone, Rendered
from llmlaunch.frameworks.framework import Framework
from llmlaunch.layout import Layout
from llmlaunch.recipe.frameworks import FRAMEWORKS
from llmlaunch.recipe.types import Recipe


def framework_named(name: str) -> Framework:
    """Return the framework of that name; the modules of the others are not imported. Raises KeyError for a name that no
    recipe can have."""
    framework: Framework = import_module(f"llmlaunch.frameworks.{FRAMEWORKS[name].folder}.framework").FRAMEWORK
    return framework


def trained_with() -> tuple[str, ...]:
    """Return the packages that any framework trains with, torch first."""
    packages = (package for name in FRAMEWORKS for package in framework_named(name).packages)
    return tuple(dict.fromkeys(("torch", *packages)))


def framework_of(recipe: Recipe) -> Framework:
    """Return the framework of a validated recipe."""
    return framework_named(recipe.backend.name)


def backend_for(recipe: Recipe) -> Backend:
    """Return the backend of a validated recipe."""
    return framework_of(recipe).backend()


def rank_alone(recipe: Recipe, layout: Layout, rendered: Rendered, pipeline_rank: int, steps: int) -> RankAlone:
    """Return one pipeline rank of the rendered job as a program of its own that runs `steps` steps.

    Raises UserError for a rank or a job that cannot run alone.
    """
    return framework_of(recipe).rank_alone(recipe, layout, rendered, pipeline_rank, steps)


def omitted_alone(recipe: Recipe, traced: bool) -> tuple[OmittedTechnique, ...]:
    """Return the techniques of a planned recipe that one rank alone runs without: on a GPU, or `traced`."""
    return framework_of(recipe).omitted_alone(recipe, traced)


def recorded_name(recipe: Recipe) -> str:
    """Return the backend name for measurement records: what a framework runs that keeps other things in memory is
    recorded under a name of its own."""
    return framework_of(recipe).recorded_name(recipe)


def timed_name(recipe: Recipe) -> str:
    """Return the backend by which step times are told apart: `recorded_name`, or the kind of script where scripts of
    one framework take other times."""
    return framework_of(recipe).timed_name(recipe)
