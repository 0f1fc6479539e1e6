"""The keys of a recipe as its published JSON Schema has them: what each means, and the words it takes.

Read from the file, so that a screen or a completion that needs them does not import what validates recipes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from llmlaunch.assets import asset
from llmlaunch.errors import UserError
from llmlaunch.frozen import frozen


@frozen
class RecipeKey:
    """One key: its meaning, whether it holds keys of its own, whether it takes a value, and the words that it takes,
    none where it takes any."""

    meaning: str
    is_mapping: bool
    is_value: bool
    words: tuple[str, ...]


def schema_names() -> tuple[str, ...]:
    """Return the names of the published JSON Schemas, `recipe` first."""
    names = (path.name.removesuffix(".schema.json") for path in asset("docs", "schemas").glob("*.schema.json"))
    return tuple(sorted(names, key=lambda name: (name != "recipe", name)))


def published_schema(name: str) -> str:
    """Return the text of a published JSON Schema. Raises UserError for a name that is none."""
    if name not in schema_names():
        raise UserError(f"schema: no schema named {name!r}; there are: {', '.join(schema_names())}")
    return asset("docs", "schemas", f"{name}.schema.json").read_text(encoding="utf-8")


@cache
def recipe_keys() -> Mapping[str, RecipeKey]:
    """Return every key of a recipe by its path, such as `training.steps`, in the order of the reference."""
    whole = json.loads(published_schema("recipe"))
    return dict(_keys_of(whole, whole["$defs"], ""))


def _keys_of(node: Mapping[str, Any], defs: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, RecipeKey]]:
    for key, field in node["properties"].items():
        inner = inner_keys(field, defs)
        words = tuple(dict.fromkeys(_words(field)))
        is_value = any("$ref" not in branch for branch in branches(field))
        yield prefix + key, RecipeKey(field.get("description", ""), inner is not None, is_value, words)
        if inner is not None:
            yield from _keys_of(inner, defs, f"{prefix}{key}.")


def _words(field: Mapping[str, Any]) -> Iterator[str]:
    for branch in branches(field):
        if "anyOf" in branch or "oneOf" in branch:
            yield from _words(branch)
        elif branch.get("type") == "boolean":
            yield from ("true", "false")
        else:
            yield from map(str, branch.get("enum", [branch["const"]] if "const" in branch else []))


def branches(field: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the kinds of value a field of a JSON Schema takes, null left out."""
    return [b for b in field.get("anyOf") or field.get("oneOf") or [field] if b.get("type") != "null"]


def inner_keys(field: Mapping[str, Any], defs: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the schema of the mapping a field may hold, None where its keys are not known."""
    for branch in branches(field):
        below = inner_keys(branch, defs) if "anyOf" in branch or "oneOf" in branch else None
        if below is not None:
            return below
        if "$ref" in branch:
            schema: Mapping[str, Any] = defs[branch["$ref"].rsplit("/", 1)[1]]
            return schema
    return None
