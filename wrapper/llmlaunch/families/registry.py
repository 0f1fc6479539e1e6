"""The families by name. Their names are those of the files in `model_types/`, and a file is imported when its family is
asked for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

from llmlaunch.families import model_types
from llmlaunch.families.family import Family, VisionClass
from llmlaunch.models.shape import ModelShape


@cache
def family_names() -> tuple[str, ...]:
    """Return the model_types that are read and written, sorted."""
    files = Path(model_types.__path__[0]).glob("*.py")
    return tuple(sorted(file.stem for file in files if file.stem != "__init__"))


@cache
def family_named(name: str) -> Family:
    """Return a family by its name. Raises KeyError where there is none."""
    if name not in family_names():
        raise KeyError(name)
    family: Family = import_module(f"{model_types.__name__}.{name}").FAMILY
    return family


def all_families() -> Iterator[tuple[str, Family]]:
    """Return every family with its name. It imports all of them."""
    return ((name, family_named(name)) for name in family_names())


def same_family(model_type: str) -> str:
    """Return the family whose class is that of `model_type` to the letter; `model_type` itself where none is."""
    if model_type in family_names():
        return model_type
    return next((name for name, family in all_families() if model_type in family.same), model_type)


@cache
def vision_classes() -> dict[str, tuple[str, VisionClass]]:
    """Return the classes with a vision encoder by their model_type, each with the family of its decoder."""
    return {
        family.vision.model_type: (name, family.vision) for name, family in all_families() if family.vision is not None
    }


def family_of(shape: ModelShape) -> str:
    """Return the family that a shape without one is taken for: the first by precedence whose mark it has."""
    by_precedence = sorted(all_families(), key=lambda item: -item[1].precedence)
    return next(name for name, family in by_precedence if family.mark is not None and family.mark(shape))
