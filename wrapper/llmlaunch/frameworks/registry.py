"""Which framework a recipe names, and what is asked of it by recipe."""

from __future__ import annotations

from importlib import import_module

from llmlaunch.frameworks.base import Backend
from llmlaunch.frameworks.framework import Framework
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
