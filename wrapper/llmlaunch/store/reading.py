"""Single questions to the store: one SELECT each, which changes nothing and makes nothing.

A SQLite file is read without the database library, whose import takes as long as half a check. The library answers for
a database server, and for a file that was left in the middle of a write, which it can mend or explain.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from llmlaunch.calibration.lessons import PUBLISHED_RATE, StopRate
from llmlaunch.store.location import Location, damaged, in_use, short_wait_seconds, stored_json

if TYPE_CHECKING:
    from llmlaunch.calibration.calibrations import Calibration


NAMED = "SELECT content FROM calibrations WHERE id = :id"
IN_USE = (
    "SELECT c.content FROM calibration_uses u LEFT JOIN calibrations c ON c.id = u.calibration_id "
    "WHERE u.backend = :backend AND u.accelerator = :accelerator ORDER BY u.id DESC LIMIT 1"
)
_RUNS = "SELECT 1 FROM runs JOIN recipes ON recipes.id = runs.recipe_id WHERE digest = :digest OR name = :name LIMIT 1"
_MEASURED = "SELECT 1 FROM measurements WHERE (family IS NULL OR family <> 'rehearsed') AND backend IN"
_REHEARSED = "SELECT content FROM measurements WHERE family = 'rehearsed' AND backend = :backend ORDER BY position"

_STOPS = (
    "SELECT COALESCE(SUM(unplanned_stops), 0), COALESCE(SUM(device_hours), 0.0) FROM runs "
    "WHERE accelerator = :accelerator AND device_hours IS NOT NULL"
)


def stored_calibration(
    location: Location, backend: str, accelerator: str, named: str | None = None
) -> Calibration[Any] | None:
    """Return the calibration of the id `named`, else the one in use for `backend` (a value of TABLES) on `accelerator`
    or, for step times, the class of jobs in words; None if there is none.

    Raises:
        UserError: the store cannot be read. KeyError, TypeError, ValueError: the calibration is damaged.
    """
    if named is not None:
        rows = _select(location, NAMED, id=named)
    else:
        rows = _select(location, IN_USE, backend=backend, accelerator=accelerator)
    if not rows or rows[0][0] is None:
        return None
    from llmlaunch.calibration.calibrations import calibration_of_json  # most stores have none

    return calibration_of_json(stored_json(rows[0][0]))


def stop_rate(location: Location, accelerator: str) -> StopRate:
    """Return how often runs on that accelerator were stopped unplanned, in how many device-hours. Raises UserError if
    the store cannot be read."""
    rows = _select(location, _STOPS, accelerator=accelerator)
    return StopRate(int(rows[0][0]), float(rows[0][1])) if rows else PUBLISHED_RATE


def rehearsal_texts(location: Location, backend: str) -> list[str]:
    """Return the JSON of every record of a rehearsal with that backend. Raises UserError if the store cannot be
    read."""
    return [str(row[0]) for row in _select(location, _REHEARSED, backend=backend)]


def has_runs_of(location: Location, digest: str, name: str) -> bool:
    """Whether a recipe of that content or name may have run. A server is not asked, and counts as yes. Raises UserError
    if a file cannot be read."""
    return location.path is None or bool(_select(location, _RUNS, digest=digest, name=name))


def has_measurements(location: Location, backends: Sequence[str]) -> bool:
    """Whether the store holds any run, rehearsals aside, with one of those backends. Raises UserError if it cannot be
    read."""
    names = {f"b{index}": name for index, name in enumerate(backends)}
    places = ", ".join(f":{name}" for name in names)
    return bool(_select(location, f"{_MEASURED} ({places}) LIMIT 1", **names))


def _select(location: Location, statement: str, **values: str) -> list[Any]:
    if location.path is not None:
        try:
            return _select_from_file(location, statement, values)
        except sqlite3.Error as error:
            if "locked" in str(error):
                raise in_use(location, error) from None
        except UnicodeDecodeError as error:
            raise damaged(location, error) from None
    from sqlalchemy import text

    from llmlaunch.store.database import open_store

    with open_store(location) as store, store.read() as connection:
        return list(connection.execute(text(statement), values))


def _select_from_file(location: Location, statement: str, values: dict[str, str]) -> list[Any]:
    """Return no row of a file without tables yet."""
    file, timeout = f"file:{quote(str(location.path))}?mode=ro", short_wait_seconds(location)
    with closing(sqlite3.connect(file, uri=True, timeout=timeout)) as connection:
        try:
            return connection.execute(statement, values).fetchall()
        except sqlite3.OperationalError as error:
            if str(error).startswith("no such table"):
                return []
            raise
