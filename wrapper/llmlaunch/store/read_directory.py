"""One run directory, whole: whether it is a known run and has changed, and what collecting writes of it. Reads files,
writes nothing, and asks no database."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmlaunch.causes.cause import sentence
from llmlaunch.errors import UserError
from llmlaunch.rehearsal.records import collected_rehearsal, is_rehearsal
from llmlaunch.rundir import file_names
from llmlaunch.rundir.files import read_object, read_run_id
from llmlaunch.rundir.memory_files import summarize
from llmlaunch.rundir.regular_files import read_bytes
from llmlaunch.rundir.run import RunDirectoryError, RunFiles, read_run
from llmlaunch.rundir.summary import AttemptSummary
from llmlaunch.rundir.values import counted
from llmlaunch.store.run_outcome import (
    AttemptCauses,
    AttemptOutcome,
    LauncherWord,
    attempt_causes,
    attempt_outcomes,
    failures_of,
    launched_by,
    run_state,
    stop_columns,
)
from llmlaunch.store.run_records import AttemptRecords, oom_records, records_of
from llmlaunch.store.runs import ONGOING, secrets_of, stored, stored_row, unix_seconds, worst_predicted
from llmlaunch.store.sick_nodes import Failure

_LOOKED_AT = (
    file_names.RUN,
    file_names.RUN_ID,
    file_names.SUBMISSION,
    file_names.ENDED,
    file_names.STATUS,
    file_names.ATTEMPTS,
)


@dataclass(frozen=True)
class Outcome:
    """What collecting did about one run. `did` is "collected", "unchanged" (collected before), "waiting" (submitted or
    running, and not named) or "unreadable"; `measurements` counts its records, `reason` is why there is no more,
    `damaged` how many lines of which files (paths in the run directory) could not be read."""

    run_id: str | None
    directory: Path
    did: str
    state: str | None = None
    measurements: int = 0
    reason: str | None = None
    damaged: Mapping[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "directory": str(self.directory), "damaged": dict(self.damaged)}

    def sentence(self) -> str:
        name = self.run_id or str(self.directory)
        if self.did == "unreadable":
            return str(self.reason)
        count = counted(self.measurements, "measurement")
        done = {"unchanged": "nothing new", "waiting": "not collected"}.get(self.did, f"collected, {count}")
        more = [*([self.reason] if self.reason else []), *(_damage(*file) for file in sorted(self.damaged.items()))]
        return "; ".join([f"{name} ({self.state}): {done}", *more])


def _damage(path: str, lines: int) -> str:
    return f"{counted(lines, 'damaged line')} in {path} {'were' if lines > 1 else 'was'} left out"


@dataclass(frozen=True)
class KnownRun:
    """A run in the store. `files` is the signature of what was collected last: if it is equal, nobody wrote since."""

    run_id: str
    directory: Path
    state: str
    word: LauncherWord | None
    files: str | None
    attempt: str | None = None  # the newest one


def run_id_of(directory: Path, stored: Mapping[str, KnownRun], named: bool) -> str:
    """Return the id in `run.id`; `stored` are the runs that the directory may hold.

    Raises UserError if there is none, if the directory is a copy of a stored run's, and, unless it was `named` by a
    person, if it now holds another run than the stored one.
    """
    run_id = read_run_id(directory)
    if run_id is None and not os.path.lexists(directory / file_names.RUN_ID):
        if not (directory / file_names.RUN).exists():
            raise UserError(f"{directory}: no run directory (it has no run.json)")
        raise UserError(f"{directory}: this run has never been submitted (it has no run.id)")
    if run_id is None:
        raise UserError(
            f"{directory / file_names.RUN_ID}: must hold the run's id, one line of at most 200 letters and digits"
        )
    if not named and run_id not in stored:
        raise UserError(f"{directory}: held run {next(iter(stored))}, but now holds {run_id}")
    before = stored.get(run_id)
    _refuse_copy(directory, run_id, before.directory if before else None)
    return run_id


def _refuse_copy(directory: Path, run_id: str, original: Path | None) -> None:
    """Refuse a copy beside the original. A moved directory is the same run."""
    if original is None or original == directory:
        return
    try:
        copied = read_run_id(original) == run_id and not original.samefile(directory)
    except (OSError, ValueError):
        return
    if copied:
        raise UserError(
            f"{directory}: is a copy of run {run_id}, which the store knows in {original}; collect that "
            "one, or delete run.id in the copy and submit it as a run of its own"
        )


def signature(directory: Path, state: str) -> str:
    """Return a digest that changes when there may be something new to read. It is over sizes and times; no file is
    opened.

    Peaks of a running attempt rise all the time and are not looked at. Files that are replaced by renaming (the
    summary, the causes) touch their folder.
    """
    looked_at = [directory / name for name in _LOOKED_AT]
    over = state != "running"
    for attempt in _entries(directory / file_names.ATTEMPTS):
        looked_at += [attempt, *_with_files(attempt / file_names.PROBES)] if over else []
        looked_at += [*_with_files(attempt / file_names.RANKS), attempt / file_names.CAUSES]
    looked_at += _entries(directory / file_names.PEAKS) if over else []
    digest = hashlib.sha256()
    for path in looked_at:
        try:
            stat = path.stat()
            state_of_file = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n"
        except OSError:
            state_of_file = f"{path}\0absent\n"
        digest.update(state_of_file.removeprefix(str(directory)).encode(errors="surrogateescape"))
    return digest.hexdigest()


def _with_files(folder: Path) -> list[Path]:
    """A folder and the files in it to which nodes append; those of earlier versions were replaced, one for each rank,
    and touched it."""
    return [folder, *(path for path in _entries(folder) if path.suffix == ".jsonl")]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


@dataclass(frozen=True)
class RecipeRead:
    """The recipe as given; of equal content is one of equal `key`."""

    name: str
    digest: str
    text: str
    overrides: tuple[str, ...]

    def as_stored(self, secrets: tuple[str, ...]) -> RecipeRead:
        overrides = tuple(stored(word, secrets) for word in self.overrides)
        return replace(self, text=stored(self.text, secrets), overrides=overrides)

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.digest


@dataclass(frozen=True)
class RunRead:
    """All that is to be written of one run. `before` is what the store held of it when the files were read. A
    `rehearsal` is none: of it the records are kept, and which nodes failed."""

    run_id: str
    before: KnownRun | None
    outcome: Outcome
    files: RunFiles
    row: dict[str, Any]
    recipe: RecipeRead | None
    plan_text: str | None
    records: list[dict[str, Any]]
    failures: list[Failure]
    rehearsal: bool = False


def read_directory(directory: Path, known: Mapping[str, KnownRun], named: bool) -> Outcome | RunRead:
    """Return what is new in a directory, or the outcome if nothing is. `known` are the runs that it may belong to.

    Raises UserError if it is no run directory, or the directory of another run; OSError, ValueError, TypeError and
    RecursionError if its files cannot be read.
    """
    run_id = run_id_of(directory, known, named)
    before = known.get(run_id)
    if before is not None and before.directory == directory and before.files is not None:
        same = before.files == signature(directory, before.state)
        if same and not (named and before.state == "running"):
            did = "waiting" if before.state in ONGOING else "unchanged"
            return Outcome(run_id, directory, did, before.state)
    if before is not None and before.attempt and not _entries(directory / file_names.ATTEMPTS):
        # removed, perhaps by a site that removes old files: they cannot tell less than they told
        lost = f"the records of attempt {before.attempt} are gone; what was collected of it stays"
        return Outcome(run_id, directory, "unchanged", before.state, reason=lost)
    # before the files are read
    signatures = {state: signature(directory, state) for state in ("running", "over")}
    try:
        files = read_run(directory)
    except RunDirectoryError as error:
        raise UserError(str(error)) from error
    word = before.word if before else None
    outcomes = attempt_outcomes(files, word)
    refused = files.refused is not None and not outcomes
    state = "refused" if refused else run_state(outcomes, files.submission, word)
    wanted = [attempt for attempt in outcomes if attempt.over or named]
    reason = word.why if word else ""
    causes = {attempt.name: attempt_causes(directory, attempt, reason) for attempt in wanted if attempt.over}
    # not of a running attempt that nobody named: the files of a long run may be large
    summaries = [_summary(files, attempt.name) for attempt in wanted]
    recipe = _recipe(files)
    secrets = secrets_of([recipe.text, *recipe.overrides] if recipe else [])
    by_attempt = [
        _attempt_records(files, run_id, *both, causes, secrets) for both in zip(wanted, summaries, strict=True)
    ]
    records = [record for measured in by_attempt for record in measured.records]
    last_none = by_attempt[-1].why_none if by_attempt else None
    if not outcomes and state not in ONGOING:
        last_none = "the job never started"
    row = _row(directory, files, outcomes, state)
    row["no_peak_reason"] = last_none
    if refused and files.refused is not None:
        row.update(why=files.refused, launcher="slurm")
    _add_cause(row, outcomes, causes)
    if not is_rehearsal(files.run):
        row |= stop_columns(files.run, outcomes, summaries, causes)
    row["files"] = signatures["running" if state == "running" else "over"]
    reasons = [reason for reason in (_still_running(outcomes, named), last_none, *files.problems) if reason]
    did = "collected" if wanted or state not in ONGOING else "waiting"
    outcome = Outcome(run_id, directory, did, state, len(records), "; ".join(reasons) or None, _damaged(summaries))
    plan_text = _optional_text(directory / file_names.PLAN)
    failures = failures_of(directory, run_id, row["cluster"], list(causes.values()))
    alone = is_rehearsal(files.run)
    return _stored(RunRead(run_id, before, outcome, files, row, recipe, plan_text, records, failures, alone), secrets)


def _stored(read: RunRead, secrets: tuple[str, ...]) -> RunRead:
    """With every text as it is stored; those of the records are already."""
    return replace(
        read,
        row=stored_row(read.row, secrets),
        recipe=None if read.recipe is None else read.recipe.as_stored(secrets),
        plan_text=None if read.plan_text is None else stored(read.plan_text, secrets),
        failures=[replace(failure, reason=stored(failure.reason, secrets)) for failure in read.failures],
    )


def _attempt_records(
    files: RunFiles,
    run_id: str,
    attempt: AttemptOutcome,
    summary: AttemptSummary,
    causes: Mapping[str, AttemptCauses],
    secrets: tuple[str, ...],
) -> AttemptRecords:
    """What an attempt measured is compared with the layout it ran; never with another one's prediction. Where it ran
    out of memory, that is a record, too."""
    run = files.run_of(attempt.name)
    if run is None:
        return AttemptRecords((), f"attempt {attempt.name} ran another layout, whose run.json cannot be read")
    if attempt.state in ("stopped", "cancelled") and not summary.steps_run and _promises_steps(run):
        return AttemptRecords((), f"attempt {attempt.name} was told to stop before its first step")
    run = {**run, "measurement": json.loads(stored(json.dumps(run.get("measurement")), secrets))}
    measured = records_of(run, run_id, summary, attempt.state)
    nodes = causes[attempt.name].nodes if attempt.name in causes else ()
    out = oom_records(run, run_id, attempt.name, attempt.ranks, nodes, measured.records, attempt.state)
    if is_rehearsal(run):
        versions = _versions(files.directory / file_names.ATTEMPTS / attempt.name)
        ran_out = attempt.state == "failed" and any(record["peak_kind"] == "oom" for record in out)
        rehearsed, why = collected_rehearsal(run, run_id, summary, attempt.state, ran_out, versions)
        return AttemptRecords(tuple(stored_row(record, secrets) for record in rehearsed), why)
    return AttemptRecords((*measured.records, *(stored_row(record, secrets) for record in out)), measured.why_none)


def _promises_steps(run: Mapping[str, Any]) -> bool:
    """Whether the log shows every step: that of a person's own script may show none, however long it trained."""
    progress = run.get("progress")
    return isinstance(progress, Mapping) and progress.get("promised") is True


def _summary(files: RunFiles, attempt: str) -> AttemptSummary:
    written = next((entry.summary for entry in files.attempts if entry.name == attempt), None)
    return written or summarize(files.directory, attempt)


def _damaged(summaries: Sequence[AttemptSummary]) -> dict[str, int]:
    """By file the number of lines that could not be read; one that names no attempt is counted in each."""
    worst: dict[str, int] = {}
    for summary in summaries:
        for name, lines in summary.damaged.items():
            worst[name] = max(lines, worst.get(name, 0))
    return dict(sorted(worst.items()))


def _row(directory: Path, files: RunFiles, outcomes: Sequence[AttemptOutcome], state: str) -> dict[str, Any]:
    newest = outcomes[-1] if outcomes else None
    launcher, job_id, cluster = launched_by(files, list(outcomes))
    # sbatch names the cluster only where there are several; the job knows it anyway
    cluster = cluster or next(
        filter(None, (attempt.began.get("cluster") for attempt in reversed(files.attempts))), None
    )
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
    newest = causes.get(outcomes[-1].name) if outcomes else None
    first = newest.first if newest else None
    row["cause"] = str(first.get("kind")) if first else None
    if first and "why" not in row:
        row["why"] = sentence(first)


def _recipe(files: RunFiles) -> RecipeRead | None:
    name, digest, overrides = (files.run.get(key) for key in ("name", "recipe_digest", "overrides"))
    text = _optional_text(files.directory / file_names.RECIPE)
    if not isinstance(name, str) or not isinstance(digest, str) or text is None:
        return None
    return RecipeRead(name, digest, text, tuple(map(str, overrides)) if isinstance(overrides, list) else ())


def _still_running(outcomes: Sequence[AttemptOutcome], named: bool) -> str | None:
    if not outcomes or outcomes[-1].over:
        return None
    so_far = "these are its peaks so far" if named else "name the run to collect what it has"
    return f"attempt {outcomes[-1].name} has not ended yet: {so_far}"


def _versions(attempt: Path) -> Mapping[str, Any]:
    """Return the package versions that the trainer of a rank run alone wrote down; empty where there are none."""
    return read_object(attempt / file_names.VERSIONS) or {}


def _optional_text(path: Path) -> str | None:
    try:
        return read_bytes(path).decode()
    except (OSError, ValueError):
        return None
