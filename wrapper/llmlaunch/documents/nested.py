"""Values in nested mappings, by dotted keys such as "zero_optimization.stage"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def leaves(values: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value that holds no other value, with its dotted key. A list and an empty mapping count as values."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{within}{name}.")
        else:
            yield f"{within}{name}", value


def value_at(values: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key, or None if the key is absent."""
    value: Any = values
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def put_at(values: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of a dotted key, and create the mappings that contain it."""
    *sections, name = key.split(".")
    within = values
    for section in sections:
        within = within.setdefault(section, {})
    within[name] = value


def with_values(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings merged from both; where both have a value, the one in `above` wins."""
    merged = dict(below)
    for name, value in above.items():
        inner = merged.get(name)
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            merged[name] = with_values(inner, value)
        else:
            merged[name] = value
    return merged
