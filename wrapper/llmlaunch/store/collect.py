"""Run directories into the store. Files are the truth: this only reads them, and collecting twice changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection

from llmlaunch.errors import UserError
from llmlaunch.rundir.spool_place import spool_root, spooled
from llmlaunch.store.collected_runs import Known, Outcome, known_runs, known_runs_of
from llmlaunch.store.database import Store, open_store
from llmlaunch.store.measurements import put_collected, write_rehearsed
from llmlaunch.store.read_directory import RunRead, read_directory
from llmlaunch.store.runs import put_plan, put_recipe, put_runs
from llmlaunch.store.sick_nodes import put_failures

__all__ = ["Outcome", "collect", "open_collected"]

MOST_RECORDS = 5000  # of one transaction: some 20 MB, and a second or so in which other writers wait


@dataclass(frozen=True)
class _Asked:
    """`run_id` is None where a person named the directory, else the run that it is known for. `spools` are folders of
    this machine with what its nodes could not write there."""

    directory: Path
    run_id: str | None
    spools: Sequence[Path]


@dataclass(frozen=True)
class _Job:
    asked: _Asked
    read: RunRead


def open_collected(say: Callable[[str], None]) -> Store:
    """Open the store and collect what has finished since, as every command that reads it does first.

    `say` gets a sentence for each run collected, and the reason where the store can be read but not written. Raises
    UserError where the store cannot be opened.
    """
    store = open_store()
    for warning in store.warnings:
        say(f"warning: {warning}")
    try:
        for outcome in collect(store):
            if outcome.did == "collected":
                say(outcome.sentence())
    except UserError as error:
        say(f"warning: finished runs were not collected: {error}")
    return store


def collect(store: Store, run_dirs: Iterable[Path] | None = None) -> list[Outcome]:
    """Write runs and measurements of run directories into the store; what was done about each, in their order.

    None: all known runs, those that are over and whose files changed since. A named directory may be of a run the
    store never heard of, and its running attempt is taken as far as it got. Many runs share a transaction; what was not
    written when this program died is collected the next time. Raises UserError for a store that cannot be written; what
    is wrong with one directory is the `reason` of its outcome.
    """
    with store.read() as connection:
        known = known_runs(connection)
    wanted: list[tuple[Path, str | None]]
    if run_dirs is None:
        wanted = [(run.directory, run.run_id) for run in known.values()]
    else:
        wanted = [(path.resolve(), None) for path in run_dirs]
    spools = spooled(spool_root(os.environ))
    asked = [_Asked(directory, run_id, spools.get(directory, ())) for directory, run_id in wanted]
    outcomes: dict[int, Outcome] = {}
    batch: dict[int, _Job] = {}
    for number, one in enumerate(asked):
        found = _read(one, known)
        if isinstance(found, Outcome):
            outcomes[number] = found
            continue
        batch[number] = _Job(one, found)
        if sum(len(job.read.records) for job in batch.values()) >= MOST_RECORDS:
            outcomes.update(_written(store, batch))
            batch = {}
    outcomes.update(_written(store, batch))
    return [outcomes[number] for number in range(len(asked))]


def _read(asked: _Asked, known: Mapping[str, Known]) -> Outcome | RunRead:
    """One directory, with all that can be wrong with its files turned into a reason."""
    mine = known if asked.run_id is None else {asked.run_id: known[asked.run_id]}
    try:
        return read_directory(asked.directory, mine, asked.run_id is None, asked.spools)
    except UserError as error:
        said = str(error)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        said = f"{asked.directory}: cannot be read: {error}"
    return Outcome(asked.run_id, asked.directory, "unreadable", reason=said)


def _written(store: Store, batch: Mapping[int, _Job]) -> dict[int, Outcome]:
    """What was read, in one transaction. A run that another program has written since, or that is in the batch twice,
    is read again in a second one, while nobody else writes."""
    if not batch:
        return {}
    done: dict[int, RunRead] = {}
    with store.write() as connection:
        now = known_runs_of(connection, {job.read.run_id for job in batch.values()})
        taken: set[str] = set()
        for number, job in batch.items():
            if job.read.run_id not in taken and now.get(job.read.run_id) == job.read.before:
                done[number] = job.read
            taken.add(job.read.run_id)
        _write(connection, list(done.values()))
    outcomes = {}
    again = [number for number in batch if number not in done]
    if again:
        with store.write() as connection:
            for number in again:
                job = batch[number]
                found = _read(job.asked, known_runs_of(connection, [job.read.run_id]))
                if isinstance(found, Outcome):
                    outcomes[number] = found
                else:
                    _write(connection, [found])
                    done[number] = found
    return outcomes | {number: read.outcome for number, read in done.items()}


def _write(connection: Connection, read: Sequence[RunRead]) -> None:
    recipes: dict[tuple[str, str], int] = {}  # many runs are of few recipes and plans
    plans: dict[tuple[int, str], int] = {}
    rows = {}
    for one in read:
        rows[one.run_id] = row = dict(one.row)
        if one.rehearsal:
            del rows[one.run_id]
            write_rehearsed(connection, one.records)
            continue
        if one.recipe is None:
            continue
        recipe, plan = one.recipe, one.plan_text
        if recipe.key not in recipes:
            recipes[recipe.key] = put_recipe(connection, recipe.name, recipe.digest, recipe.text, recipe.overrides)
        row["recipe_id"] = recipe_id = recipes[recipe.key]
        if plan is not None:
            if (recipe_id, plan) not in plans:
                plans[recipe_id, plan] = put_plan(connection, recipe_id, plan)
            row["plan_id"] = plans[recipe_id, plan]
    put_runs(connection, rows)
    put_collected(connection, [record for one in read if not one.rehearsal for record in one.records])
    put_failures(connection, [failure for one in read for failure in one.failures])
