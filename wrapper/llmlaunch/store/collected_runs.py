"""What the store holds of a run before it is collected, whether a directory is that run and has changed, and what
collecting did about it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, select

from llmlaunch.errors import UserError
from llmlaunch.rundir import file_names
from llmlaunch.rundir.files import read_run_id
from llmlaunch.rundir.values import counted
from llmlaunch.store.database import batches
from llmlaunch.store.run_outcome import LauncherWord
from llmlaunch.store.tables import runs

__all__ = ["KnownRun", "Outcome", "known_runs", "known_runs_of", "run_id_of", "signature"]

_LOOKED_AT = (
    file_names.RUN,
    file_names.RUN_ID,
    file_names.SUBMISSION,
    file_names.REFUSED,
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
        """Return one line for a person."""
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


def known_runs(connection: Connection) -> dict[str, KnownRun]:
    """Return every run by its id, in the order of the ids."""
    return {row.run_id: _known_run(row) for row in connection.execute(select(runs).order_by(runs.c.run_id))}


def known_runs_of(connection: Connection, run_ids: Iterable[str]) -> dict[str, KnownRun]:
    """Return the runs of these ids that the store holds."""
    known: dict[str, KnownRun] = {}
    for some in batches(run_ids):
        wanted = select(runs).where(runs.c.run_id.in_(some))
        known.update((row.run_id, _known_run(row)) for row in connection.execute(wanted))
    return known


def _known_run(row: Row[Any]) -> KnownRun:
    state = row.launcher_state
    word = None if state is None else LauncherWord(state, row.launcher_said_at, row.why or "")
    return KnownRun(row.run_id, Path(row.directory), row.state, word, row.files)


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


def signature(directory: Path, state: str, spools: Sequence[Path] = ()) -> str:
    """Return a digest that changes when there may be something new to read. It is over sizes and times; no file is
    opened.

    Peaks of a running attempt rise all the time and are not looked at. Files that are replaced by renaming (rank
    records, probes, the summary) touch their folder; `spools` hold what belongs in the directory, too.
    """
    looked_at = [directory / name for name in _LOOKED_AT]
    over = state != "running"
    for attempt in _entries(directory / file_names.ATTEMPTS):
        looked_at += [attempt, attempt / file_names.PROBES] if over else []
        looked_at += [attempt / file_names.RANKS, attempt / file_names.CAUSES]
    for place in (directory, *spools) if over else ():
        looked_at += _entries(place / file_names.PEAKS)
    for place in spools if over else ():
        looked_at += [attempt / file_names.PROBES for attempt in _entries(place / file_names.ATTEMPTS)]
    digest = hashlib.sha256()
    for path in looked_at:
        try:
            stat = path.stat()
            state_of_file = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n"
        except OSError:
            state_of_file = f"{path}\0absent\n"
        digest.update(state_of_file.removeprefix(str(directory)).encode(errors="surrogateescape"))
    return digest.hexdigest()


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
