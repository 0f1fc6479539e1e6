"""No layout is legal at all: what stands in the way."""

from __future__ import annotations

from llmlaunch.errors import UserError
from llmlaunch.planner.search import Found
from llmlaunch.planner.setting import Setting
from llmlaunch.recipe.types import Recipe

__all__ = ["no_layout"]


def no_layout(setting: Setting, found: Found) -> UserError:
    """The error for a space that holds no legal layout."""
    return UserError(_no_layout(setting.recipe, found))


def _no_layout(recipe: Recipe, found: Found) -> str:
    if not found.searched:
        pins = ", ".join(f"{k}={v}" for k, v in recipe.pins.items()) or "none"
        return (
            f"{recipe.path}: layout: no split of {recipe.world_size} devices ({recipe.nodes} nodes x "
            f"{recipe.cluster.devices_per_node}) matches the pins ({pins}); free a pin or change nodes"
        )
    key, count = max(found.refused.items(), key=lambda item: item[1])
    rule = next(r for r in found.rules if r.key == key)
    return (
        f"{recipe.path}: layout: none of {found.searched} layouts is legal; {count} are refused because "
        f"{rule.sentence} [{key}]; change the batch, the nodes or the pins accordingly"
    )
