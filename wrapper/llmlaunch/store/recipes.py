"""Recipes by name and content digest, and their plans. Both are written once and never change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from sqlalchemy import Connection, select

from llmlaunch.store.tables import plans, recipes

__all__ = ["put_plan", "put_recipe"]


def put_recipe(connection: Connection, name: str, digest: str, text: str, overrides: Sequence[str]) -> int:
    """The recipe's row, new or as first seen; `digest` is over the content, so the text may differ in comments."""
    found = connection.execute(
        select(recipes.c.id).where(recipes.c.name == name, recipes.c.digest == digest)
    ).scalar_one_or_none()
    if found is not None:
        return int(found)
    row = {"name": name, "digest": digest, "text": text, "overrides": json.dumps(list(overrides))}
    return int(connection.execute(recipes.insert().returning(recipes.c.id), row).scalar_one())


def put_plan(connection: Connection, recipe_id: int, content: str) -> int:
    """The plan's row. `content` is plan.json as text; equal text is one plan."""
    digest = hashlib.sha256(content.encode()).hexdigest()
    found = connection.execute(
        select(plans.c.id).where(plans.c.recipe_id == recipe_id, plans.c.digest == digest)
    ).scalar_one_or_none()
    if found is not None:
        return int(found)
    row = {"recipe_id": recipe_id, "digest": digest, "content": content}
    return int(connection.execute(plans.insert().returning(plans.c.id), row).scalar_one())
