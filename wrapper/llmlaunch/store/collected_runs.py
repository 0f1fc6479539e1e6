"""What the store holds of runs before they are collected."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, select

from llmlaunch.errors import UserError
from llmlaunch.rundir.files import read_run_id
from llmlaunch.rundir.messages import counted
from llmlaunch.store.database import batches
from llmlaunch.store.run_outcome import LauncherWord
from llmlaunch.store.tables import runs

__all__ = ["Known", "Outcome", "known_runs", "known_runs_of", "run_id_of", "signature"]


@dataclass(frozen=True)
class Known:
    """One run. `files` is the signature of what was collected last; two that are equal say that nobody wrote since."""

    run_id: str
    directory: Path
    state: str
    word: LauncherWord | None
    files: str | None


def known_runs(connection: Connection) -> dict[str, Known]:
    """Every run by its id, in the order of the ids."""
    return {row.run_id: _known(row) for row in connection.execute(select(runs).order_by(runs.c.run_id))}


def known_runs_of(connection: Connection, run_ids: Iterable[str]) -> dict[str, Known]:
    """Those of these ids that the store holds."""
    found: dict[str, Known] = {}
    for some in batches(run_ids):
        wanted = select(runs).where(runs.c.run_id.in_(some))
        found.update((row.run_id, _known(row)) for row in connection.execute(wanted))
    return found


def _known(row: Row[Any]) -> Known:
    said = row.launcher_state
    word = None if said is None else LauncherWord(said, row.launcher_said_at, row.why or "")
    return Known(row.run_id, Path(row.directory), row.state, word, row.files)


def run_id_of(directory: Path, known: Mapping[str, Known], named: bool) -> str:
    """The id in `run.id`; `known` are the runs in the store.

    Raises UserError where there is none, where the directory is a copy of a known run's, and, unless it was `named`
    by a person, where it now holds another run than the one it is known for.
    """
    run_id = read_run_id(directory)
    if run_id is None and not os.path.lexists(directory / "run.id"):
        if not (directory / "run.json").exists():
            raise UserError(f"{directory}: no run directory (it has no run.json)")
        raise UserError(f"{directory}: this run has never been submitted (it has no run.id)")
    if run_id is None:
        raise UserError(f"{directory / 'run.id'}: must hold the run's id, one line of at most 200 letters and digits")
    if not named and run_id not in known:
        raise UserError(f"{directory}: held run {next(iter(known))}, but now holds {run_id}")
    before = known.get(run_id)
    _refuse_copy(directory, run_id, before.directory if before else None)
    return run_id


def _refuse_copy(directory: Path, run_id: str, original: Path | None) -> None:
    """A moved directory is the same run; a copy beside the original is not."""
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


_LOOKED_AT = ("run.json", "run.id", "submission.json", "refused.json", "status.json", "attempts")


def signature(directory: Path, state: str, spools: Sequence[Path] = ()) -> str:
    """A digest that changes when there may be something new to read: of sizes and times, no file is opened.

    Peaks of a running attempt rise all the time and are not looked at. Files that are replaced by renaming (rank
    records, probes, the summary) touch their folder; `spools` hold what belongs in the directory, too.
    """
    looked_at = [directory / name for name in _LOOKED_AT]
    over = state != "running"
    for attempt in _entries(directory / "attempts"):
        looked_at += [attempt, attempt / "memory"] if over else []
        looked_at += [attempt / "ranks", attempt / "causes"]
    for place in (directory, *spools) if over else ():
        looked_at += _entries(place / "peaks")
    for place in spools if over else ():
        looked_at += [attempt / "memory" for attempt in _entries(place / "attempts")]
    digest = hashlib.sha256()
    for path in looked_at:
        try:
            stat = path.stat()
            seen = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n"
        except OSError:
            seen = f"{path}\0absent\n"
        digest.update(seen.removeprefix(str(directory)).encode(errors="surrogateescape"))
    return digest.hexdigest()


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


@dataclass(frozen=True)
class Outcome:
    """What was done about one run. `did` is "collected", "unchanged" (collected before), "waiting" (submitted or
    running, and not named) or "unreadable"; `measurements` counts its records, `reason` says why there is no more,
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
        """One line for a person."""
        name = self.run_id or str(self.directory)
        if self.did == "unreadable":
            return str(self.reason)
        count = counted(self.measurements, "measurement")
        done = {"unchanged": "nothing new", "waiting": "not collected"}.get(self.did, f"collected, {count}")
        more = [*([self.reason] if self.reason else []), *(_damage(*one) for one in sorted(self.damaged.items()))]
        return "; ".join([f"{name} ({self.state}): {done}", *more])


def _damage(path: str, lines: int) -> str:
    return f"{counted(lines, 'damaged line')} in {path} {'were' if lines > 1 else 'was'} left out"
