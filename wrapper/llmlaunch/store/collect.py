"""Run directories into the store. Files are the truth: this only reads them, and collecting twice changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, select

from llmlaunch.causes.words import sentence
from llmlaunch.errors import UserError
from llmlaunch.runs.read import RunFiles, read_run
from llmlaunch.store.database import Store
from llmlaunch.store.measurements import put_collected
from llmlaunch.store.oom_records import oom_records
from llmlaunch.store.open import open_store
from llmlaunch.store.peaks import Peaks, read_peaks
from llmlaunch.store.recipes import put_plan, put_recipe
from llmlaunch.store.run_causes import AttemptCauses, attempt_causes, failures_of
from llmlaunch.store.run_identity import run_id_of, signature
from llmlaunch.store.run_outcome import AttemptOutcome, LauncherWord, attempt_outcomes, launched_by, run_state
from llmlaunch.store.run_records import AttemptRecords, attempt_records
from llmlaunch.store.runs import ONGOING, put_run, unix_seconds, worst_predicted
from llmlaunch.store.sick_nodes import Failure, put_failures
from llmlaunch.store.tables import runs

__all__ = ["Outcome", "collect", "open_collected"]


@dataclass(frozen=True)
class Outcome:
    """What was done about one run. `did` is "collected", "unchanged" (collected before), "waiting" (submitted or
    running, and not named) or "unreadable"; `measurements` counts its records, `reason` says why there is no more."""

    run_id: str | None
    directory: Path
    did: str
    state: str | None = None
    measurements: int = 0
    reason: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "directory": str(self.directory)}

    def sentence(self) -> str:
        """One line for a person."""
        name = self.run_id or str(self.directory)
        if self.did == "unreadable":
            return str(self.reason)
        count = f"{self.measurements} measurement{'' if self.measurements == 1 else 's'}"
        done = {"unchanged": "nothing new", "waiting": "not collected"}.get(self.did, f"collected, {count}")
        return f"{name} ({self.state}): {done}" + (f"; {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class _Known:
    """What the store holds of a run before it is collected."""

    run_id: str
    directory: Path
    state: str
    word: LauncherWord | None
    files: str | None


def open_collected(say: Callable[[str], None]) -> Store:
    """Open the store and collect what has finished since, as every command that reads it does first.

    `say` gets a sentence for each run collected, and the reason where the store can be read but not written. Raises
    UserError where it cannot be opened.
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
    """Write runs and measurements of run directories into the store, each run in a transaction of its own.

    None: all known runs, those that are over and whose files changed since. A named directory may be of a run the
    store never heard of, and its running attempt is taken as far as it got. Raises UserError for a store that cannot
    be written; what is wrong with one directory is the `reason` of its outcome.
    """
    known = _known_runs(store)
    if run_dirs is None:
        return [_guarded(store, run.directory, {run.run_id: run}, named=False) for run in known.values()]
    return [_guarded(store, path.resolve(), known, named=True) for path in run_dirs]


def _known_runs(store: Store) -> dict[str, _Known]:
    wanted = select(runs).order_by(runs.c.run_id)
    with store.read() as connection:
        return {
            row.run_id: _Known(row.run_id, Path(row.directory), row.state, _word(row), row.files)
            for row in connection.execute(wanted)
        }


def _word(row: Row[Any]) -> LauncherWord | None:
    return None if row.launcher_state is None else LauncherWord(row.launcher_state, row.launcher_said_at, row.why or "")


def _guarded(store: Store, directory: Path, known: dict[str, _Known], named: bool) -> Outcome:
    """One directory, with all that can be wrong with its files turned into a reason."""
    run_id = None if named else next(iter(known))
    try:
        plan = _read(directory, known, named)
    except UserError as error:
        return Outcome(run_id, directory, "unreadable", reason=str(error))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        return Outcome(run_id, directory, "unreadable", reason=f"{directory}: cannot be read: {error}")
    if isinstance(plan, Outcome):
        return plan
    with store.write() as connection:
        _write(connection, plan)
    return plan.outcome


@dataclass(frozen=True)
class _ToWrite:
    outcome: Outcome
    files: RunFiles
    row: dict[str, Any]
    recipe_text: str | None
    plan_text: str | None
    records: list[dict[str, Any]]
    failures: list[Failure]


def _read(directory: Path, known: dict[str, _Known], named: bool) -> Outcome | _ToWrite:
    run_id = run_id_of(directory, {key: run.directory for key, run in known.items()}, named)
    before = known.get(run_id)
    if before is not None and before.directory == directory and before.files is not None:
        same = before.files == signature(directory, before.state)
        if same and not (named and before.state == "running"):
            did = "waiting" if before.state in ONGOING else "unchanged"
            return Outcome(run_id, directory, did, before.state)
    signatures = {state: signature(directory, state) for state in ("running", "over")}  # before the files are read
    files = read_run(directory)
    word = before.word if before else None
    outcomes = attempt_outcomes(files, word)
    state = run_state(outcomes, files.submission, word)
    wanted = [attempt for attempt in outcomes if attempt.over or named]
    causes = {one.name: attempt_causes(directory, one, word.why if word else "") for one in wanted if one.over}
    made, problems = _attempts_records(files, run_id, wanted, causes)
    records = [record for one in made for record in one.records]
    last_none = made[-1].why_none if made else None
    if not outcomes and state not in ONGOING:
        last_none = "the job never started"
    row = _row(directory, files, outcomes, state)
    row["no_peak_reason"] = last_none
    _add_cause(row, outcomes, causes)
    row["files"] = signatures["running" if state == "running" else "over"]
    reasons = [reason for reason in (_still_running(outcomes, named), last_none, *files.problems, *problems) if reason]
    did = "collected" if wanted or state not in ONGOING else "waiting"
    outcome = Outcome(run_id, directory, did, state, len(records), "; ".join(reasons) or None)
    recipe_text, plan_text = (_optional_text(directory / name) for name in ("recipe.yaml", "plan.json"))
    failures = failures_of(directory, run_id, row["cluster"], list(causes.values()))
    return _ToWrite(outcome, files, row, recipe_text, plan_text, records, failures)


def _attempts_records(
    files: RunFiles, run_id: str, wanted: Sequence[AttemptOutcome], causes: Mapping[str, AttemptCauses]
) -> tuple[list[AttemptRecords], tuple[str, ...]]:
    if not wanted:
        return [], ()  # the files of a long run that still goes on may be large
    peaks, problems = read_peaks(files.peaks)
    return [_attempt_records(files, run_id, one, peaks, causes.get(one.name)) for one in wanted], problems


def _attempt_records(
    files: RunFiles, run_id: str, attempt: AttemptOutcome, peaks: Peaks, causes: AttemptCauses | None
) -> AttemptRecords:
    """What an attempt measured is compared with the layout it ran; never with another one's prediction. Where it ran
    out of memory, that is a record, too."""
    run = files.run_of(attempt.name)
    if run is None:
        return AttemptRecords((), f"attempt {attempt.name} ran another layout, whose run.json cannot be read")
    made = attempt_records(run, run_id, attempt.name, attempt.ranks, peaks, attempt.state)
    nodes = causes.nodes if causes else ()
    out = oom_records(run, run_id, attempt.name, attempt.ranks, nodes, made.records, attempt.state)
    return AttemptRecords((*made.records, *out), made.why_none)


def _row(directory: Path, files: RunFiles, outcomes: Sequence[AttemptOutcome], state: str) -> dict[str, Any]:
    newest = outcomes[-1] if outcomes else None
    launcher, job_id, cluster = launched_by(files, list(outcomes))
    # sbatch names the cluster only where there are several; the job knows it anyway
    cluster = cluster or next((attempt.cluster for attempt in reversed(files.attempts) if attempt.cluster), None)
    run = (files.run_of(newest.name) if newest else None) or files.run
    row: dict[str, Any] = {
        "directory": str(directory),
        "launcher": launcher,
        "job_id": job_id,
        "cluster": cluster,
        "state": state,
        "attempt": newest.name if newest else None,
        "started_at": newest.started_at if newest else None,
        "peak_kind": str(run.get("peak_kind")),
        "predicted_bytes": worst_predicted(run),
    }
    if files.submission is not None:
        row["submitted_at"] = unix_seconds(files.submission.get("submitted_at"))
    if state in ONGOING:
        row.update(why=None, ended_at=None, exit_code=None)
    elif newest is not None and (newest.ended_at or newest.exit_code is not None):  # else the launcher's word stays
        row.update(why=newest.why, ended_at=newest.ended_at, exit_code=newest.exit_code)
    return row


def _add_cause(row: dict[str, Any], outcomes: Sequence[AttemptOutcome], causes: Mapping[str, AttemptCauses]) -> None:
    """What ended the newest attempt; in words, too, where it left no verdict with a reason of its own."""
    known = causes.get(outcomes[-1].name) if outcomes else None
    first = known.first if known else None
    row["cause"] = str(first.get("kind")) if first else None
    if first and "why" not in row:
        row["why"] = sentence(first)


def _write(connection: Connection, what: _ToWrite) -> None:
    row = what.row
    name, digest = what.files.run.get("name"), what.files.run.get("recipe_digest")
    if isinstance(name, str) and isinstance(digest, str) and what.recipe_text is not None:
        words = what.files.run.get("overrides")
        overrides = [str(word) for word in words] if isinstance(words, list) else []
        row["recipe_id"] = put_recipe(connection, name, digest, what.recipe_text, overrides)
        if what.plan_text is not None:
            row["plan_id"] = put_plan(connection, row["recipe_id"], what.plan_text)
    put_run(connection, str(what.outcome.run_id), row)
    put_collected(connection, what.records)
    put_failures(connection, what.failures)


def _still_running(outcomes: Sequence[AttemptOutcome], named: bool) -> str | None:
    if not outcomes or outcomes[-1].over:
        return None
    so_far = "these are its peaks so far" if named else "name the run to collect what it has"
    return f"attempt {outcomes[-1].name} has not ended yet: {so_far}"


def _optional_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
