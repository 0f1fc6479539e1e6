"""What the store holds of runs before they are collected."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, select

from llmlaunch.store.batches import batches
from llmlaunch.store.run_outcome import LauncherWord
from llmlaunch.store.tables import runs

__all__ = ["Known", "known_runs", "known_runs_of"]


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
