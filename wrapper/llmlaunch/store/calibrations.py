"""Calibrations in the store: all of them are kept, and which one was in use since when."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, or_, select

from llmlaunch.calibration.calibrations import Calibration, calibration_of_json
from llmlaunch.errors import UserError
from llmlaunch.store.tables import calibration_uses, calibrations, measurements

__all__ = ["Use", "all_calibrations", "find_calibration", "in_use", "put", "records_of_devices", "use", "uses"]

NOT_OF_A_DEVICE = ("host", "host_oom", "fits")
AT_ONCE = 2000


@dataclass(frozen=True)
class Use:
    """From `since` (unix seconds) on predictions for the backend and accelerator took this calibration, or none."""

    backend: str
    accelerator: str
    calibration_id: str | None
    since: float


def put(connection: Connection, calibration: Calibration) -> None:
    """Keep it; nothing uses it yet. Inside the caller's transaction, as all of these are."""
    row = {name: getattr(calibration, name) for name in ("id", "backend", "accelerator", "made_at")}
    content = json.dumps(calibration.as_json(), separators=(",", ":"), allow_nan=False)
    connection.execute(calibrations.insert(), {**row, "content": content})


def records_of_devices(connection: Connection) -> Iterator[dict[str, Any]]:
    """Every measurement that may say what a device needs, the newest first and one after the other: 100,000 of them are
    400 MB."""
    kind = measurements.c.peak_kind
    wanted = (
        select(measurements.c.content)
        .where(or_(kind.is_(None), kind.not_in(NOT_OF_A_DEVICE)))
        .order_by(measurements.c.position.desc())
        .execution_options(yield_per=AT_ONCE)
    )
    for content in connection.execute(wanted).scalars():
        yield json.loads(content)


def all_calibrations(
    connection: Connection, backend: str | None = None, accelerator: str | None = None
) -> list[Calibration]:
    """Every one, or those of a backend (a value of TABLES) and accelerator; the oldest first."""
    wanted = select(calibrations.c.content).order_by(calibrations.c.made_at, calibrations.c.id)
    for column, value in ((calibrations.c.backend, backend), (calibrations.c.accelerator, accelerator)):
        if value is not None:
            wanted = wanted.where(column == value)
    return [calibration_of_json(json.loads(content)) for content in connection.execute(wanted).scalars()]


def find_calibration(connection: Connection, calibration_id: str) -> Calibration:
    """Raises UserError: the store holds no such calibration."""
    wanted = select(calibrations.c.content).where(calibrations.c.id == calibration_id)
    content = connection.execute(wanted).scalar()
    if content is None:
        raise UserError(f"{calibration_id}: no such calibration; `llmlaunch calibrate list` shows all of them")
    return calibration_of_json(json.loads(content))


def in_use(connection: Connection, backend: str, accelerator: str) -> Calibration | None:
    """What predictions for `backend` (a value of TABLES) on `accelerator` take now."""
    latest = uses(connection, backend, accelerator)[-1:]
    named = latest[0].calibration_id if latest else None
    return None if named is None else find_calibration(connection, named)


def use(connection: Connection, backend: str, accelerator: str, calibration_id: str | None, now: float) -> None:
    """From `now` on take this calibration, or none. What was in use before stays on record.

    Raises UserError: there is no such calibration, or it is of another backend or accelerator.
    """
    if calibration_id is not None:
        found = find_calibration(connection, calibration_id)
        if (found.backend, found.accelerator) != (backend, accelerator):
            raise UserError(
                f"{calibration_id} is of {found.backend} on {found.accelerator}, not {backend} on {accelerator}"
            )
    row = {"backend": backend, "accelerator": accelerator, "calibration_id": calibration_id, "since": now}
    connection.execute(calibration_uses.insert(), row)


def uses(connection: Connection, backend: str | None = None, accelerator: str | None = None) -> Sequence[Use]:
    """What was in use since when, the oldest first."""
    wanted = select(calibration_uses).order_by(calibration_uses.c.id)
    for column, value in ((calibration_uses.c.backend, backend), (calibration_uses.c.accelerator, accelerator)):
        if value is not None:
            wanted = wanted.where(column == value)
    return [Use(row.backend, row.accelerator, row.calibration_id, row.since) for row in connection.execute(wanted)]
