"""The JSON Schemas of recipes and cluster profiles, for editors, and the reference of a recipe's keys, for the docs.

`make docs-tables` writes them from the descriptions that stand with each key: docs/schemas/recipe.schema.json,
docs/schemas/cluster.schema.json and the table in docs/recipe-keys.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from llmlaunch.cluster.profile import cluster_form
from llmlaunch.recipe.key_reference import branches, inner_keys
from llmlaunch.recipe.types import recipe_form

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- keys -->\n", "<!-- end of keys -->"


_DIALECT = "https://json-schema.org/draft/2020-12/schema"


@cache
def schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a recipe file. Making it takes a quarter of a second."""
    return {"$schema": _DIALECT, **TypeAdapter(recipe_form()).json_schema(), "title": "llmlaunch recipe"}


def cluster_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a cluster profile."""
    return {"$schema": _DIALECT, **TypeAdapter(cluster_form()).json_schema(), "title": "llmlaunch cluster profile"}


def reference_table() -> str:
    """Every key of a recipe as a Markdown table: key, type, default, meaning."""
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    lines += [f"| `{key}` | {kind} | {default} | {about} |" for key, kind, default, about in _rows()]
    return "\n".join(lines) + "\n"


def _rows() -> Iterator[tuple[str, str, str, str]]:
    whole = schema()
    yield from _rows_of(whole, whole["$defs"], "")


def _rows_of(node: Mapping[str, Any], defs: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str, str, str]]:
    required = set(node.get("required", ()))
    for key, field in node["properties"].items():
        inner = inner_keys(field, defs)
        default = "required" if key in required else _default(field, inner)
        yield prefix + key, _kind(field, defs), default, field.get("description", "")
        if inner is not None:
            yield from _rows_of(inner, defs, f"{prefix}{key}.")


def _default(field: Mapping[str, Any], inner: Mapping[str, Any] | None) -> str:
    value = field.get("default")
    if value is None or value == [] or value == {} or (inner is not None and isinstance(value, dict)):
        return ""
    return f"`{json.dumps(value)}`" if not isinstance(value, str) else f"`{value}`"


def _kind(field: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    return " or ".join(dict.fromkeys(_kind_of(branch, defs) for branch in branches(field)))


def _kind_of(node: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    if "anyOf" in node or "oneOf" in node:
        return _kind(node, defs)
    if "$ref" in node:
        return "mapping"
    if "const" in node:
        return f"`{node['const']}`"
    if "enum" in node:
        return ", ".join(f"`{value}`" for value in node["enum"])
    if isinstance(node.get("type"), list):
        return " or ".join(_WORDS.get(name, name) for name in node["type"])
    if node.get("type") == "array":
        return f"list of {_kind_of(node['items'], defs)}"
    return _WORDS.get(str(node.get("type")), "mapping") + _bounds(node)


_WORDS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true/false", "object": "mapping"}


def _bounds(node: Mapping[str, Any]) -> str:
    low = node.get("minimum", node.get("exclusiveMinimum"))
    high = node.get("maximum", node.get("exclusiveMaximum"))
    if low is None and high is None:
        return ""
    least = f"above {_figure(low)}" if "exclusiveMinimum" in node else f"at least {_figure(low)}"
    most = f"below {_figure(high)}" if "exclusiveMaximum" in node else f"at most {_figure(high)}"
    return ", " + ", ".join(text for text, bound in ((least, low), (most, high)) if bound is not None)


def _figure(bound: float | None) -> str:
    return str(int(bound)) if bound is not None and bound == int(bound) else str(bound)


def main() -> None:
    """Write the JSON Schemas and the table into the docs."""
    for name, content in (("recipe", schema()), ("cluster", cluster_schema())):
        (DOCS / "schemas" / f"{name}.schema.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    page = DOCS / "recipe-keys.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(before + BEGIN + reference_table() + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
