"""Sections of a model from plain values, as JSON and YAML have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

__all__ = ["required_keys", "section_from", "sections_of"]

Section = TypeVar("Section")


@cache
def _hints(cls: Any) -> Mapping[str, Any]:
    return get_type_hints(cls)


def _is_optional(cls: Any, item: Field[Any]) -> bool:
    return type(None) in get_args(_hints(cls)[item.name])


def _has_default(item: Field[Any]) -> bool:
    return item.default is not MISSING or item.default_factory is not MISSING


@cache
def sections_of(cls: Any) -> Mapping[str, type[Any]]:
    """Return the fields of a section that are sections themselves, with the class of each."""
    return {
        name: member
        for name, hint in _hints(cls).items()
        for member in (hint, *get_args(hint))
        if isinstance(member, type) and is_dataclass(member)
    }


@cache
def required_keys(cls: Any) -> tuple[str, ...]:
    """Return the fields that a section cannot be without."""
    return tuple(item.name for item in fields(cls) if not _has_default(item) and not _is_optional(cls, item))


def section_from(cls: type[Section], values: Mapping[str, Any]) -> Section:
    """Return a section of plain values: mappings become sections, lists tuples, and null is a field that is absent.
    Raises TypeError for a field that there is not."""
    of_class: Any = cls
    sections = sections_of(of_class)
    chosen: dict[str, Any] = dict.fromkeys(_nullable(of_class))
    for name, value in values.items():
        if isinstance(value, Mapping) and name in sections:
            chosen[name] = section_from(sections[name], value)
        elif value is not None:
            chosen[name] = tuple(value) if isinstance(value, list) else value
    return cls(**chosen)


@cache
def _nullable(cls: Any) -> tuple[str, ...]:
    """Return the fields without a default that may be None."""
    return tuple(item.name for item in fields(cls) if not _has_default(item) and _is_optional(cls, item))
