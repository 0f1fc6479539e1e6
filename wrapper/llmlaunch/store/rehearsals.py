"""Rehearsals in the store: kept beside the measured runs, asked for by shape."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete

from llmlaunch.backends.registry import backend_for, recorded_name
from llmlaunch.calibration.selection import REHEARSED
from llmlaunch.planner.plan import Plan
from llmlaunch.recipe.types import Recipe
from llmlaunch.rehearsal.evidence import rehearsed_ranks
from llmlaunch.rehearsal.rehearsed import RehearsedRank
from llmlaunch.rehearsal.shape import shape_of
from llmlaunch.store.database import Store
from llmlaunch.store.measurements import Filters, contents, put_collected
from llmlaunch.store.tables import measurements

__all__ = ["put_rehearsed", "rehearsed_of", "write_rehearsed"]


def put_rehearsed(store: Store, records: Sequence[Mapping[str, Any]]) -> int:
    """Write what `records_of` made; the number of records that changed. Raises UserError for a store that cannot be
    written."""
    with store.write() as connection:
        return write_rehearsed(connection, records)


def write_rehearsed(connection: Connection, records: Sequence[Mapping[str, Any]]) -> int:
    """The same inside the caller's transaction. A rank rehearsed again takes the place of what it showed before, also
    where that was of another kind: one that ran out of memory has no peak, and the other way about."""
    ids = [str(record["id"]) for record in records]
    table, changed = measurements, 0
    for place in {each.rpartition("/")[0] for each in ids}:
        of_place = table.c.id.startswith(f"{place}/", autoescape=True)
        changed += connection.execute(delete(table).where(of_place, table.c.id.not_in(ids))).rowcount
    return changed + put_collected(connection, records)


def rehearsed_of(store: Store, recipe: Recipe, plan: Plan) -> tuple[RehearsedRank, ...]:
    """What was rehearsed of the plan's very shape and framework version, one for each pipeline rank. `recipe` is as
    planned."""
    shape = shape_of(recipe, plan, backend_for(recipe).render(recipe, plan.layout))["shape"]
    kept = contents(store, Filters(family=REHEARSED, backend=recorded_name(recipe)))
    return rehearsed_ranks([json.loads(content) for content in kept], shape, recipe, plan)
