"""Text on its way into the store: without secrets, and such that every database can hold it.

The store outlives the runs, is backed up and is exported to others; a run directory is where things are as they were.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import yaml

from llmlaunch.causes.redaction import masked, secret_values

__all__ = ["secrets_of", "stored", "stored_row"]

_REPLACED = {0: "\ufffd", **dict.fromkeys(range(0xD800, 0xE000), "\ufffd")}  # NUL, and halves of surrogate pairs
_AS_THEY_ARE = frozenset({"run_id", "directory", "files", "recipe_id", "plan_id"})  # they find something again


def secrets_of(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the values in this environment of all variables that these recipes, or key=value overrides, list under
    `secrets`, and of those named like a secret."""
    names = {name for text in texts for name in _listed(text)}
    return tuple(secret_values(os.environ, names))


@lru_cache(maxsize=256)
def stored(text: str, secrets: tuple[str, ...] = ()) -> str:
    """Return `text` as it is stored. Thousands of runs are of few recipes and plans, so the last ones are cached."""
    safe = masked(text, secrets)
    return safe if safe.isascii() and "\0" not in safe else safe.translate(_REPLACED)


def stored_row(row: Mapping[str, Any], secrets: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the columns of a table, or a record's own values, with every text as it is stored."""
    return {
        name: stored(value, secrets) if isinstance(value, str) and name not in _AS_THEY_ARE else value
        for name, value in row.items()
    }


@lru_cache(maxsize=256)
def _listed(text: str) -> tuple[str, ...]:
    if "secrets" not in text:
        return ()
    try:
        recipe = yaml.safe_load(text.replace("=", ": ", 1) if text.startswith("secrets=") else text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return ()
    names = recipe.get("secrets") if isinstance(recipe, dict) else None
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()
