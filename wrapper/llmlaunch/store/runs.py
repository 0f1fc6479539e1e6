"""Runs in the store, with their recipes and plans: recorded when submitted, listed, found by a name, and updated by
what a launcher knows; and texts on their way into the store, without secrets and such that every database can hold
them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from sqlalchemy import ColumnElement, Connection, bindparam, func, select

from llmlaunch.causes.redaction import masked, secret_values
from llmlaunch.documents.likely_meaning import nearest
from llmlaunch.errors import UserError
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir.files import read_run_id
from llmlaunch.rundir.run_file import read_run_file
from llmlaunch.rundir.values import byte_count, time_or_none
from llmlaunch.store.database import Store, batches
from llmlaunch.store.location import LAST
from llmlaunch.store.tables import measurements, plans, recipes, runs

ONGOING = ("submitted", "running")  # every other state is the end of a run


@dataclass(frozen=True)
class Run:
    """One run, with the fields of `runs --json`. `predicted_bytes` and `measured_bytes` are the worst rank's, of
    `peak_kind`; times are unix seconds. `state` is submitted, running, succeeded, failed, or a launcher's word
    (cancelled, lost ...)."""

    run_id: str
    recipe: str | None
    recipe_digest: str | None
    launcher: str | None
    job_id: str | None
    cluster: str | None
    state: str
    why: str | None
    cause: str | None
    attempt: str | None
    submitted_at: float | None
    started_at: float | None
    ended_at: float | None
    exit_code: int | None
    peak_kind: str | None
    predicted_bytes: int | None
    measured_bytes: int | None
    no_peak_reason: str | None
    directory: Path

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "directory": str(self.directory)}


def record_submission(
    store: Store, recipe: Recipe, plan_json: Mapping[str, Any], run_dir: Path, submission: Mapping[str, Any]
) -> str:
    """Record a run that has just been submitted, for the first time or again, and return its id.

    `submission` has `launcher`, `job_id`, `submitted_at` (unix seconds or ISO 8601) and perhaps `cluster`. The id is
    that of `run.id`. Raises UserError if that is not written yet.
    """
    directory = run_dir.resolve()
    run_id = read_run_id(directory)
    if run_id is None:
        raise UserError(f"{directory}: holds no run.id, so this run has no name in the store; submit it again")
    run = read_run_file(directory)
    secrets = tuple(secret_values(os.environ, recipe.secrets))
    text, overrides = stored(recipe.text, secrets), [stored(word, secrets) for word in recipe.overrides]
    plan = stored(json.dumps(plan_json, sort_keys=True), secrets)
    with store.write() as connection:
        recipe_id = put_recipe(connection, recipe.name, recipe.digest, text, overrides)
        row = {
            "directory": str(directory),
            "recipe_id": recipe_id,
            "plan_id": put_plan(connection, recipe_id, plan),
            "launcher": submission.get("launcher"),
            "job_id": None if submission.get("job_id") is None else str(submission["job_id"]),
            "cluster": submission.get("cluster"),
            "state": "submitted",
            "why": None,
            "cause": None,
            "launcher_state": None,
            "launcher_said_at": None,
            "submitted_at": unix_seconds(submission.get("submitted_at")),
            "ended_at": None,
            "exit_code": None,
            "peak_kind": run.get("peak_kind"),
            "predicted_bytes": worst_predicted(run),
            "files": None,
        }
        put_runs(connection, {run_id: row})
    return run_id


def set_state(store: Store, run_id: str, state: str, why: str | None = None, ended_at: float | None = None) -> None:
    """Record what a launcher knows and no file tells: the scheduler dropped the job, or it was cancelled before it
    began.

    A final state holds until the run is submitted again, a later attempt begins (after `ended_at`, or now), or its
    own status.json says how it ended. Nothing happens to an unknown run.
    """
    row: dict[str, Any] = {"state": state, "why": why, "ended_at": ended_at}
    if state not in ONGOING:
        reported_at = time.time() if ended_at is None else ended_at
        row |= {"launcher_state": state, "launcher_said_at": reported_at, "files": None}  # files: collect what it left
    of_run = select(recipes).join(runs, runs.c.recipe_id == recipes.c.id).where(runs.c.run_id == run_id)
    with store.write() as connection:
        texts = [text for recipe in connection.execute(of_run) for text in (recipe.text, *json.loads(recipe.overrides))]
        secrets = secrets_of(texts)
        connection.execute(runs.update().where(runs.c.run_id == run_id).values(stored_row(row, secrets)))


@dataclass(frozen=True)
class RunFilter:
    """Which runs to list; a field that is None or empty narrows nothing. `since` is in unix seconds, of submission;
    `limit` keeps the newest."""

    states: tuple[str, ...] = ()
    recipe: str | None = None
    since: float | None = None
    cluster: str | None = None
    launcher: str | None = None
    limit: int | None = None


def list_runs(store: Store, which: RunFilter | None = None) -> list[Run]:
    """Return the runs, the newest first: every one, or those of the filter."""
    which = which or RunFilter()
    began = func.coalesce(runs.c.submitted_at, runs.c.started_at, 0.0)
    wanted = (
        select(runs, recipes.c.name, recipes.c.digest)
        .outerjoin(recipes, runs.c.recipe_id == recipes.c.id)
        .where(*_conditions(which, began))
        .order_by(began.desc(), runs.c.run_id.desc())
        .limit(which.limit)
    )
    with store.read() as connection:
        measured = _worst_measured(connection)
        return [_run(row._mapping, measured) for row in connection.execute(wanted)]


def _conditions(which: RunFilter, began: ColumnElement[float]) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if which.states:
        conditions.append(runs.c.state.in_(which.states))
    for column, value in (
        (recipes.c.name, which.recipe),
        (runs.c.cluster, which.cluster),
        (runs.c.launcher, which.launcher),
    ):
        if value is not None:
            conditions.append(column == value)
    if which.since is not None:
        conditions.append(began >= which.since)
    return conditions


def find_run(store: Store, word: str, notify: Callable[[str], None] = lambda message: None) -> Run:
    """Return the run that a person means: by its id, its directory's path or name, its job's id, or, where nothing is
    called exactly so, by the beginning of its id or of its directory's name. `last` is the newest of their runs, which
    `notify` is told, unless a run is called so.

    Raises UserError if there is none, and with the candidates if there is more than one.
    """
    all_runs = list_runs(store)
    # pathlib raises for names that are too long or of no user
    directory = Path(os.path.abspath(os.path.expanduser(word)))  # noqa: PTH100, PTH111
    by_path = (directory, Path(os.path.realpath(directory)))
    exact = [
        run for run in all_runs if word in (run.run_id, run.job_id, run.directory.name) or run.directory in by_path
    ]
    starts = [run for run in all_runs if word and (run.run_id.startswith(word) or run.directory.name.startswith(word))]
    matches = exact or starts
    if word == LAST and not exact:
        newest = _newest_own_run(store, all_runs)
        notify(f"last: the newest run, {newest.run_id} in {newest.directory}")
        return newest
    if len(matches) == 1:
        return matches[0]
    if matches:
        shown = "".join(f"\n  {run.run_id} in {run.directory}" for run in matches[:8])
        more = f"\n  and {len(matches) - 8} more" if len(matches) > 8 else ""
        how = "is" if exact else "is the beginning of"
        raise UserError(f"{word!r} {how} the name of {len(matches)} runs; name one by its id:{shown}{more}")
    names = [name for run in all_runs for name in (run.directory.name, run.run_id)]
    near = nearest(word, list(dict.fromkeys(names)))
    meant = f"did you mean {near[0]}? " if near else ""
    raise UserError(
        f"no run {word!r} in the store {store.location.shown}; {meant}`llmlaunch runs` lists them, and "
        "`llmlaunch collect DIR` takes in a run directory"
    )


def _newest_own_run(store: Store, newest_first: Iterable[Run]) -> Run:
    """Return the newest run whose directory is there and this person's: others may share the store."""
    for run in newest_first:
        with contextlib.suppress(OSError):
            if run.directory.stat().st_uid == os.getuid():
                return run
    raise UserError(
        f"{LAST}: the store {store.location.shown} knows no run with a directory of yours; `llmlaunch submit RECIPE` "
        "starts a run, and `llmlaunch runs` lists those of the store"
    )


def put_runs(connection: Connection, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Insert or update runs, by their ids, inside the caller's transaction. A column that a row does not name keeps its
    value."""
    existing: set[str] = set()
    for some in batches(rows):
        existing.update(connection.execute(select(runs.c.run_id).where(runs.c.run_id.in_(some))).scalars())
    new: dict[tuple[str, ...], list[dict[str, Any]]] = {}  # one statement for all rows with the same columns
    changed: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for run_id, row in rows.items():
        if run_id in existing:
            changed.setdefault(tuple(row), []).append({**row, "this_run": run_id})
        else:
            new.setdefault(tuple(row), []).append({**row, "run_id": run_id})
    for values in new.values():
        connection.execute(runs.insert(), values)
    for columns, values in changed.items():
        chosen = runs.update().where(runs.c.run_id == bindparam("this_run"))
        connection.execute(chosen.values({name: bindparam(name) for name in columns}), values)


def unix_seconds(value: object) -> float | None:
    """Return the unix seconds of a time as submission.json may have it: a number, or ISO 8601 text."""
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
        except ValueError:
            return None
    return time_or_none(value)


def worst_predicted(run: Mapping[str, Any]) -> int | None:
    """Return the largest of run.json's predicted bytes per pipeline rank."""
    predicted = run.get("predicted_bytes")
    listed = predicted if isinstance(predicted, list) else []
    return max((value for value in listed if byte_count(value) is not None), default=None)


def _worst_measured(connection: Connection) -> dict[tuple[str, str], int]:
    """Return by run and kind the worst rank's peak in the newest attempt that has any."""
    grouped = (
        select(
            measurements.c.run_id,
            measurements.c.peak_kind,
            func.max(measurements.c.started_at).label("started"),
            func.max(measurements.c.peak_bytes).label("peak"),
        )
        .where(measurements.c.run_id.is_not(None), measurements.c.peak_bytes.is_not(None))
        .group_by(measurements.c.run_id, measurements.c.peak_kind, measurements.c.attempt)
    )
    rows = sorted(connection.execute(grouped), key=lambda row: row.started or 0.0)
    return {(row.run_id, row.peak_kind): int(row.peak) for row in rows}


def _run(row: Mapping[Any, Any], measured: Mapping[tuple[str, str], int]) -> Run:
    same = {name: row[name] for name in Run.__dataclass_fields__ if name in row and name != "directory"}
    return Run(
        **same,
        directory=Path(row["directory"]),
        recipe=row["name"],
        recipe_digest=row["digest"],
        measured_bytes=measured.get((row["run_id"], row["peak_kind"])),
    )


def put_recipe(connection: Connection, name: str, digest: str, text: str, overrides: Sequence[str]) -> int:
    """Return the id of the recipe's row, which is inserted once and never changed. `digest` is over the content, so the
    text may differ in comments."""
    existing = connection.execute(
        select(recipes.c.id).where(recipes.c.name == name, recipes.c.digest == digest)
    ).scalar_one_or_none()
    if existing is not None:
        return int(existing)
    row = {"name": name, "digest": digest, "text": text, "overrides": json.dumps(list(overrides))}
    return int(connection.execute(recipes.insert().returning(recipes.c.id), row).scalar_one())


def put_plan(connection: Connection, recipe_id: int, content: str) -> int:
    """Return the id of the plan's row. `content` is plan.json as text; equal text is one plan."""
    digest = hashlib.sha256(content.encode()).hexdigest()
    existing = connection.execute(
        select(plans.c.id).where(plans.c.recipe_id == recipe_id, plans.c.digest == digest)
    ).scalar_one_or_none()
    if existing is not None:
        return int(existing)
    row = {"recipe_id": recipe_id, "digest": digest, "content": content}
    return int(connection.execute(plans.insert().returning(plans.c.id), row).scalar_one())


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
