"""Run directories into the store. Files are the truth: this only reads them, and collecting twice changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, select

from llmlaunch.errors import UserError
from llmlaunch.progress import counting
from llmlaunch.store.database import Store, batches, open_store
from llmlaunch.store.location import DamagedStore
from llmlaunch.store.measurements import put_collected, write_rehearsed
from llmlaunch.store.read_directory import KnownRun, Outcome, RunRead, read_directory
from llmlaunch.store.run_outcome import LauncherWord
from llmlaunch.store.runs import ONGOING, put_plan, put_recipe, put_runs
from llmlaunch.store.sick_nodes import put_failures
from llmlaunch.store.tables import runs

__all__ = ["Outcome", "collect", "collect_running", "open_collected"]

MOST_RECORDS = 5000  # of one transaction: some 20 MB, and a second or so in which other writers wait


class _Target(NamedTuple):
    """A directory to collect. `run_id` is None if a person named it, else the run that it is known for."""

    directory: Path
    run_id: str | None


def open_collected(say: Callable[[str], None], wait_seconds: float | None = None) -> Store:
    """Open the store and collect what has finished since, as every command that reads it does first. `wait_seconds` is
    how long another program is waited for, as for `open_store`.

    `say` gets a sentence for each run collected, and the reason if the store can be read but not written. Raises
    UnusableStore if the store cannot be opened or is damaged.
    """
    store = open_store(wait_seconds=wait_seconds)
    for warning in store.warnings:
        say(f"warning: {warning}")
    try:
        for outcome in collect(store):
            if outcome.did == "collected":
                say(outcome.sentence())
    except DamagedStore:
        store.close()
        raise
    except UserError as error:
        say(f"warning: finished runs were not collected: {error}")
    return store


def collect_running(store: Store) -> list[Outcome]:
    """Write what runs that have not ended have measured so far, such as their step times; as `collect` does."""
    with store.read() as connection:
        wanted = select(runs.c.directory).where(runs.c.state.in_(ONGOING))
        directories = [Path(name) for name in connection.execute(wanted).scalars()]
    return collect(store, [directory for directory in directories if directory.is_dir()])


def collect(store: Store, run_dirs: Iterable[Path] | None = None) -> list[Outcome]:
    """Write runs and measurements of run directories into the store, and return what was done about each, in their
    order.

    Without `run_dirs` these are the stored runs that are over and whose files changed since. A named directory may be
    of a run that the store does not hold, and its running attempt is collected as far as it got. Many runs share a
    transaction; what was not written when this program died is collected the next time. Raises UserError for a store
    that cannot be written; what is wrong with one directory is the `reason` of its outcome.
    """
    with store.read() as connection:
        stored = _known_runs(connection)
    if run_dirs is None:
        targets = [_Target(run.directory, run.run_id) for run in stored.values()]
    else:
        targets = [_Target(path.resolve(), None) for path in run_dirs]
    outcomes: dict[int, Outcome] = {}
    batch: dict[int, tuple[_Target, RunRead]] = {}
    for number, target in enumerate(counting("runs", targets)):
        result = _read(target, stored)
        if isinstance(result, Outcome):
            outcomes[number] = result
            continue
        batch[number] = target, result
        if sum(len(read.records) for _, read in batch.values()) >= MOST_RECORDS:
            outcomes.update(_written(store, batch))
            batch = {}
    outcomes.update(_written(store, batch))
    return [outcomes[number] for number in range(len(targets))]


def _known_runs(connection: Connection) -> dict[str, KnownRun]:
    """Return every run by its id, in the order of the ids."""
    return {row.run_id: _known_run(row) for row in connection.execute(select(runs).order_by(runs.c.run_id))}


def _known_runs_of(connection: Connection, run_ids: Iterable[str]) -> dict[str, KnownRun]:
    return {
        row.run_id: _known_run(row)
        for some in batches(run_ids)
        for row in connection.execute(select(runs).where(runs.c.run_id.in_(some)))
    }


def _known_run(row: Row[Any]) -> KnownRun:
    state = row.launcher_state
    word = None if state is None else LauncherWord(state, row.launcher_said_at, row.why or "")
    return KnownRun(row.run_id, Path(row.directory), row.state, word, row.files, row.attempt)


def _read(target: _Target, stored: Mapping[str, KnownRun]) -> Outcome | RunRead:
    """Return what is new in one directory. Whatever is wrong with its files becomes the reason of an outcome."""
    candidates = stored if target.run_id is None else {target.run_id: stored[target.run_id]}
    try:
        return read_directory(target.directory, candidates, target.run_id is None)
    except UserError as error:
        reason = str(error)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = f"{target.directory}: cannot be read: {error}"
    return Outcome(target.run_id, target.directory, "unreadable", reason=reason)


def _written(store: Store, batch: Mapping[int, tuple[_Target, RunRead]]) -> dict[int, Outcome]:
    """Write what was read in one transaction. A run that another program has written since, or that is in the batch
    twice, is read again in a second transaction, while nobody else writes."""
    if not batch:
        return {}
    done: dict[int, RunRead] = {}
    with store.write() as connection:
        now = _known_runs_of(connection, {read.run_id for _, read in batch.values()})
        seen_ids: set[str] = set()
        for number, (_, read) in batch.items():
            if read.run_id not in seen_ids and now.get(read.run_id) == read.before:
                done[number] = read
            seen_ids.add(read.run_id)
        _write(connection, list(done.values()))
    outcomes = {}
    again = [number for number in batch if number not in done]
    if again:
        with store.write() as connection:
            for number in again:
                target, read = batch[number]
                result = _read(target, _known_runs_of(connection, [read.run_id]))
                if isinstance(result, Outcome):
                    outcomes[number] = result
                else:
                    _write(connection, [result])
                    done[number] = result
    return outcomes | {number: read.outcome for number, read in done.items()}


def _write(connection: Connection, read: Sequence[RunRead]) -> None:
    recipes: dict[tuple[str, str], int] = {}  # many runs are of few recipes and plans
    plans: dict[tuple[int, str], int] = {}
    rows = {}
    for run in read:
        if run.rehearsal:
            write_rehearsed(connection, run.records)
            continue
        rows[run.run_id] = row = dict(run.row)
        if run.recipe is None:
            continue
        recipe, plan = run.recipe, run.plan_text
        if recipe.key not in recipes:
            recipes[recipe.key] = put_recipe(connection, recipe.name, recipe.digest, recipe.text, recipe.overrides)
        row["recipe_id"] = recipe_id = recipes[recipe.key]
        if plan is not None:
            if (recipe_id, plan) not in plans:
                plans[recipe_id, plan] = put_plan(connection, recipe_id, plan)
            row["plan_id"] = plans[recipe_id, plan]
    put_runs(connection, rows)
    put_collected(connection, [record for run in read if not run.rehearsal for record in run.records])
    put_failures(connection, [failure for run in read for failure in run.failures])
