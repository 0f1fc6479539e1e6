"""What is known of runs that were collected: what a recipe really used when it last ran, and a whole run for whoever
shows it elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, func, select

from llmlaunch.calibration.records import REHEARSED
from llmlaunch.documents.yaml_strict import parse_document
from llmlaunch.errors import UserError
from llmlaunch.recipe.overrides import apply_overrides
from llmlaunch.store.database import Store
from llmlaunch.store.location import stored_json
from llmlaunch.store.tables import measurements, plans, recipes, runs

MOST_ATTEMPTS = 20


@dataclass(frozen=True)
class PastPeak:
    """The peak of the worst rank of one pipeline rank and kind. `predicted_bytes` is from that run's plan."""

    pipeline_rank: int | None
    peak_kind: str
    peak_bytes: int
    predicted_bytes: int | None
    peak_source: str | None


@dataclass(frozen=True)
class PastRun:
    """A run with measured peaks. `same_recipe` is false if the name is equal and the content is not: then its
    peaks are of another job. `started_at` is in unix seconds. A run that failed reached its peaks, and perhaps
    needed more."""

    run_id: str
    same_recipe: bool
    state: str
    started_at: float | None
    peaks: tuple[PastPeak, ...]


def last_true_peaks(store: Store, digest: str, name: str) -> PastRun | None:
    """Return the newest measured run of the recipe with this content digest, else of a recipe of this name, else None.
    A run that succeeded goes before newer ones that did not."""
    with store.read() as connection:
        for same, choice in ((True, recipes.c.digest == digest), (False, recipes.c.name == name)):
            newest = _newest(connection, choice)
            if newest is not None:
                peaks = _peaks(connection, newest.run_id, newest.attempt)
                return PastRun(newest.run_id, same, newest.state, newest.started_at, peaks)
    return None


@dataclass(frozen=True)
class MeasuredAttempt:
    """One attempt of a run: `plan` as `check --json` had it, `records` of all its ranks, `started_at` in unix seconds.
    An attempt that fell back on another layout has records of that, and still the run's plan."""

    run_id: str
    state: str
    started_at: float
    plan: Mapping[str, Any]
    records: tuple[Mapping[str, Any], ...]


def measured_attempts(store: Store, digest: str, name: str) -> list[MeasuredAttempt]:
    """Return the newest attempts of runs of the recipe with this content digest, and of recipes of this name, the
    newest first: at most MOST_ATTEMPTS."""
    chosen = (
        select(measurements.c.run_id, measurements.c.attempt, runs.c.state, plans.c.content.label("plan"))
        .add_columns(func.max(measurements.c.started_at).label("started_at"))
        .join(runs, measurements.c.run_id == runs.c.run_id)
        .join(recipes, runs.c.recipe_id == recipes.c.id)
        .join(plans, runs.c.plan_id == plans.c.id)
        .where(
            (recipes.c.digest == digest) | (recipes.c.name == name), measurements.c.family.is_distinct_from(REHEARSED)
        )
        .group_by(measurements.c.run_id, measurements.c.attempt, runs.c.state, plans.c.content)
    )
    attempts = []
    with store.read() as connection:
        rows = sorted(connection.execute(chosen).all(), key=lambda row: -(row.started_at or 0.0))[:MOST_ATTEMPTS]
        for row in rows:
            wanted = select(measurements.c.content).where(
                measurements.c.run_id == row.run_id, measurements.c.attempt == row.attempt
            )
            records = tuple(stored_json(content) for content in connection.execute(wanted).scalars())
            attempts.append(
                MeasuredAttempt(row.run_id, row.state, row.started_at or 0.0, stored_json(row.plan), records)
            )
    return attempts


def _newest(connection: Connection, choice: ColumnElement[bool]) -> Any:
    """Return the row of the newest measured attempt, or None."""
    of_attempt = (runs.c.run_id, runs.c.state, measurements.c.attempt)
    wanted = (
        select(*of_attempt, func.max(measurements.c.started_at).label("started_at"))
        .join(recipes, runs.c.recipe_id == recipes.c.id)
        .join(measurements, measurements.c.run_id == runs.c.run_id)
        .where(choice, measurements.c.peak_bytes.is_not(None), measurements.c.family.is_distinct_from(REHEARSED))
        .group_by(*of_attempt)
    )
    rows = connection.execute(wanted).all()
    return max(rows, key=lambda row: (row.state == "succeeded", row.started_at or 0.0, row.run_id), default=None)


def _peaks(connection: Connection, run_id: str, attempt: str | None) -> tuple[PastPeak, ...]:
    wanted = (
        select(measurements.c.content)
        .where(
            measurements.c.run_id == run_id,
            measurements.c.attempt == attempt if attempt is not None else measurements.c.attempt.is_(None),
            measurements.c.peak_bytes.is_not(None),
        )
        .order_by(measurements.c.peak_bytes, measurements.c.position.desc())
    )
    worst: dict[tuple[int, str], PastPeak] = {}
    for content in connection.execute(wanted).scalars():
        record = stored_json(content)
        peak = PastPeak(**{name: record.get(name) for name in PastPeak.__dataclass_fields__})
        worst[(-1 if peak.pipeline_rank is None else peak.pipeline_rank, str(peak.peak_kind))] = peak
    return tuple(worst[key] for key in sorted(worst))


_COLUMNS = ("run_id", "launcher", "job_id", "cluster", "state", "why", "cause", "attempt", "peak_kind")
_NUMBERS = ("submitted_at", "started_at", "ended_at", "exit_code", "predicted_bytes")


def stored_run(store: Store, run_id: str) -> dict[str, Any] | None:
    """Return everything that the store holds of a run: the fields of `runs --json`, `overrides`, `plan` (as
    `check --json`, or null), `records`, its measurement records, and `tracking`, the recipe's `tracking.wandb` or
    null."""
    wanted = (
        select(
            *(runs.c[name] for name in (*_COLUMNS, *_NUMBERS)),
            recipes.c.name.label("recipe"),
            recipes.c.digest.label("recipe_digest"),
            recipes.c.overrides,
            recipes.c.text.label("recipe_text"),
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
        records = [stored_json(content) for content in connection.execute(own).scalars()]
    whole = dict(row)
    whole["overrides"] = json.loads(whole["overrides"]) if whole["overrides"] else []
    whole["plan"] = stored_json(whole["plan"]) if whole["plan"] else None
    whole["tracking"] = _tracked_run(whole.pop("recipe_text"), whole["overrides"])
    return {**whole, "records": records}


def _tracked_run(recipe_text: str | None, overrides: Sequence[str]) -> dict[str, Any] | None:
    """Return `tracking.wandb` as the recipe says it; None where it says none, or cannot be read any more."""
    try:
        recipe = apply_overrides(parse_document(recipe_text or "", "recipe"), overrides).value
        tracked = recipe["tracking"]["wandb"]
    except (UserError, LookupError, TypeError):
        return None
    return tracked if isinstance(tracked, dict) else None
