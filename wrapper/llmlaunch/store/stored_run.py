"""A run as the store holds it, whole and as plain values, for whoever passes it on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select

from llmlaunch.store.database import Store
from llmlaunch.store.runs import ONGOING
from llmlaunch.store.tables import measurements, plans, recipes, runs

__all__ = ["RunMark", "run_marks", "stored_run"]

_COLUMNS = ("run_id", "launcher", "job_id", "cluster", "state", "why", "cause", "attempt", "peak_kind")
_NUMBERS = ("submitted_at", "started_at", "ended_at", "exit_code", "predicted_bytes")


@dataclass(frozen=True)
class RunMark:
    """A run that was collected. `mark` is another text whenever what the store holds of it has changed; `began` is
    unix seconds, 0 where nobody knows."""

    run_id: str
    mark: str
    began: float


def run_marks(store: Store) -> list[RunMark]:
    """Every run that was collected, also a running one as far as it got; the newest first."""
    names = ("run_id", "files", "state", "attempt", "why", "ended_at", "submitted_at", "started_at")
    wanted = select(*(runs.c[name] for name in names)).where(runs.c.files.is_not(None))
    # The digest of a run's files leaves out the peaks of a running attempt. Asked of those runs alone: for this the
    # records of all that have ended are not read.
    so_far = (
        select(measurements.c.run_id, func.count(), func.sum(measurements.c.peak_bytes))
        .where(measurements.c.run_id.in_(select(runs.c.run_id).where(runs.c.state.in_(ONGOING))))
        .group_by(measurements.c.run_id)
    )
    with store.read() as connection:
        rows = connection.execute(wanted).all()
        risen = {run_id: f"{count} {total}" for run_id, count, total in connection.execute(so_far)}
    found = [
        RunMark(
            row.run_id,
            _digest([row.files, row.state, row.attempt, row.why, row.ended_at, risen.get(row.run_id)]),
            row.started_at or row.submitted_at or 0.0,
        )
        for row in rows
    ]
    return sorted(found, key=lambda one: (-one.began, one.run_id))


def stored_run(store: Store, run_id: str) -> dict[str, Any] | None:
    """All that the store holds of a run: what `runs --json` says, `overrides`, `plan` (as `check --json`; null where
    there is none) and `records`, its measurement records."""
    wanted = (
        select(
            *(runs.c[name] for name in (*_COLUMNS, *_NUMBERS)),
            recipes.c.name.label("recipe"),
            recipes.c.digest.label("recipe_digest"),
            recipes.c.overrides,
            plans.c.content.label("plan"),
        )
        .outerjoin(recipes, runs.c.recipe_id == recipes.c.id)
        .outerjoin(plans, runs.c.plan_id == plans.c.id)
        .where(runs.c.run_id == run_id)
    )
    own = select(measurements.c.content).where(measurements.c.run_id == run_id).order_by(measurements.c.position)
    with store.read() as connection:
        row = connection.execute(wanted).mappings().first()
        if row is None:
            return None
        records = [json.loads(content) for content in connection.execute(own).scalars()]
    whole = dict(row)
    whole["overrides"] = json.loads(whole["overrides"]) if whole["overrides"] else []
    whole["plan"] = json.loads(whole["plan"]) if whole["plan"] else None
    return {**whole, "records": records}


def _digest(words: list[Any]) -> str:
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]
