"""`backend.ds_config`: keys of ds_config.json that a person writes beside those the recipe decides, and in place of
those llmlaunch chooses, such as the sizes of buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import Reason
from llmlaunch.recipe.types import Recipe

AUTO = "auto"  # for Hugging Face's Trainer, which fills it in
OWN_REASON = Reason(("backend.ds_config",), "as the recipe has it")


def own_setting(recipe: Recipe, key: str) -> Any:
    """Return the value of a dotted key of `backend.ds_config`; None where it is not written."""
    value: Any = recipe.backend.ds_config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def own_number(recipe: Recipe, key: str, automatic: int) -> int | None:
    """Return a number of `backend.ds_config`, `automatic` where it is "auto", and None where it is not written.

    Raises UserError for what is no whole number of at least 0.
    """
    value = own_setting(recipe, key)
    if value is None or (value == AUTO and isinstance(value, str)):
        return None if value is None else automatic
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != int(value):
        raise UserError(f"{recipe.path}: backend.ds_config.{key}: must be a whole number, not {str(value)[:40]!a}")
    return int(value)


def put_setting(config: dict[str, Any], key: str, value: Any) -> None:
    """Write a dotted key into a configuration."""
    *sections, name = key.split(".")
    within = config
    for section in sections:
        within = within.setdefault(section, {})
    within[name] = value


def with_own_settings(config: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the person's keys over and beside those in it."""
    merged = dict(config)
    for name, value in own.items():
        below = merged.get(name)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[name] = with_own_settings(below, value) if both else value  # type: ignore[arg-type]
    return merged


def own_leaves(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Yield every key of `backend.ds_config` that holds no section, dotted, with its value."""
    yield from _leaves(recipe.backend.ds_config)


def _leaves(settings: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{within}{name}.")
        else:
            yield f"{within}{name}", value
