"""`backend.ds_config`: keys of ds_config.json that the user sets in addition to those that the recipe decides, and in
place of those that llmlaunch chooses, such as bucket sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmlaunch.documents.nested import leaves, value_at
from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import Reason
from llmlaunch.recipe.types import Recipe

AUTO = "auto"  # for Hugging Face's Trainer, which fills it in
OWN_REASON = Reason(("backend.ds_config",), "as the recipe has it")


def own_number(recipe: Recipe, key: str, automatic: int) -> int | None:
    """Return a number in `backend.ds_config`, `automatic` if it is "auto", or None if it is absent.

    Raises UserError if it is not a whole number of at least 0.
    """
    value = value_at(recipe.backend.ds_config, key)
    if value is None or (value == AUTO and isinstance(value, str)):
        return None if value is None else automatic
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != int(value):
        raise UserError(f"{recipe.path}: backend.ds_config.{key}: must be a whole number, not {str(value)[:40]!a}")
    return int(value)


def set_keys(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each dotted key of a configuration that is not a section, with its value."""
    return ((key, value) for key, value in leaves(settings) if value != {})
