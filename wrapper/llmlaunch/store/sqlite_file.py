"""What a check asks of a SQLite store, without the database library: importing that takes as long as half a check.

One SELECT each; nothing is changed, nothing is made.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

__all__ = ["BUSY_SECONDS", "calibration_in_file", "knows_runs_of", "rehearsals_in_file"]

BUSY_SECONDS = 5.0
_NAMED = "SELECT content FROM calibrations WHERE id = ?"
_IN_USE = (
    "SELECT c.content FROM calibration_uses u LEFT JOIN calibrations c ON c.id = u.calibration_id "
    "WHERE u.backend = ? AND u.accelerator = ? ORDER BY u.id DESC LIMIT 1"
)
_RUNS = "SELECT 1 FROM runs JOIN recipes ON recipes.id = runs.recipe_id WHERE digest = ? OR name = ? LIMIT 1"
_REHEARSED = "SELECT content FROM measurements WHERE family = 'rehearsed' AND backend = ? ORDER BY position"


def calibration_in_file(path: Path, backend: str, accelerator: str, named: str | None = None) -> str | None:
    """The JSON of the calibration of that id, or of the one in use for `backend` (a value of TABLES) on `accelerator`;
    None where there is none, as in a store of a version that knew none.

    Raises:
        sqlite3.Error: the file is damaged, busy for BUSY_SECONDS, or was left in the middle of a write.
    """
    row = _first(path, _IN_USE, backend, accelerator) if named is None else _first(path, _NAMED, named)
    return None if row is None or row[0] is None else str(row[0])


def knows_runs_of(path: Path, digest: str, name: str) -> bool:
    """Whether a recipe of that content or name has run. Raises sqlite3.Error as `calibration_in_file` does."""
    return _first(path, _RUNS, digest, name) is not None


def rehearsals_in_file(path: Path, backend: str) -> list[str]:
    """The JSON of every record of a rehearsal with that backend. Raises sqlite3.Error as `calibration_in_file` does."""
    return [str(row[0]) for row in _rows(path, _REHEARSED, backend)]


def _first(path: Path, question: str, *values: str) -> tuple[Any, ...] | None:
    """The first row of the answer."""
    return next(iter(_rows(path, question, *values)), None)


def _rows(path: Path, question: str, *values: str) -> list[tuple[Any, ...]]:
    """None where the store has no such table yet."""
    with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=BUSY_SECONDS)) as connection:
        try:
            rows: list[tuple[Any, ...]] = connection.execute(question, values).fetchall()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                return []
            raise
    return rows
