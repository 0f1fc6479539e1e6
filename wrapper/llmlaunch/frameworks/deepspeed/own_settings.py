"""`backend.ds_config`: keys of ds_config.json that a person writes beside those the recipe decides, and in place of
those llmlaunch chooses, such as the sizes of buckets."""

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
    """Return a number of `backend.ds_config`, `automatic` where it is "auto", and None where it is not written.

    Raises UserError for what is no whole number of at least 0.
    """
    value = value_at(recipe.backend.ds_config, key)
    if value is None or (value == AUTO and isinstance(value, str)):
        return None if value is None else automatic
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != int(value):
        raise UserError(f"{recipe.path}: backend.ds_config.{key}: must be a whole number, not {str(value)[:40]!a}")
    return int(value)


def set_keys(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every key of a configuration that holds no section, dotted, with its value."""
    return ((key, value) for key, value in leaves(settings) if value != {})
