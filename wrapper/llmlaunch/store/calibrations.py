"""Calibrations in the store: all of them are kept, and which one was in use since when."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, or_, select

from llmlaunch import __version__
from llmlaunch.calibration.calibrations import Calibration, calibration_of_json
from llmlaunch.calibration.digest import estimator_digest
from llmlaunch.calibration.evidence import gather
from llmlaunch.calibration.learning import Outcome, learn
from llmlaunch.calibration.machines import clusters_by_gpu
from llmlaunch.calibration.pool import Pool, pools
from llmlaunch.calibration.records import TABLES
from llmlaunch.errors import UserError
from llmlaunch.store.database import Store
from llmlaunch.store.tables import calibration_uses, calibrations, measurements

__all__ = [
    "Answer",
    "Learning",
    "Use",
    "all_calibrations",
    "calibrate",
    "find_calibration",
    "in_use",
    "put",
    "records_of_devices",
    "use",
    "uses",
]


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


@dataclass(frozen=True)
class Answer:
    """What came of one backend and accelerator. `did` is `taken`, `refused`, `unchanged`, or `not taken` in a dry run;
    `why` says why it was not taken. `before` is what was in use."""

    outcome: Outcome
    did: str
    why: str | None
    before: Calibration | None

    def as_json(self) -> dict[str, Any]:
        found, before = self.outcome.found, self.before
        return {
            "backend": self.outcome.backend,
            "accelerator": self.outcome.accelerator,
            "runs": self.outcome.runs,
            "died": self.outcome.died,
            "did": self.did,
            "why": self.why,
            "before": None if before is None else before.id,
            "calibration": None if found is None else found.as_json(),
        }


@dataclass(frozen=True)
class Learning:
    """All answers, and how many records were left out for which reason."""

    answers: tuple[Answer, ...]
    left_out: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        return {"answers": [answer.as_json() for answer in self.answers], "left_out": self.left_out}


def calibrate(
    store: Store, now: float, backend: str | None = None, accelerator: str | None = None, dry_run: bool = False
) -> Learning:
    """Of every backend and accelerator in the store, or of those named. `now` is in unix seconds.

    Raises UserError: no run is of those named, or another `calibrate` was faster.
    """
    table = None if backend is None else TABLES.get(backend, backend)
    with store.read() as connection:  # ended before anything is worked out: on SQLite it keeps writers waiting
        evidence = gather(records_of_devices(connection))
        kept, used = all_calibrations(connection), uses(connection)
    found, unpriced = pools(evidence.configurations, clusters_by_gpu())
    wanted = [one for one in found if table in (None, one.backend) and accelerator in (None, one.accelerator)]
    if not wanted and (backend or accelerator):
        raise UserError(_none_such(backend, accelerator, found))
    answers = tuple(_answer(pool, *_earlier(pool, kept, used), now, dry_run) for pool in wanted)
    taken = [answer for answer in answers if answer.did == "taken"]
    if taken:
        _take(store, taken, now)
    left_out = evidence.left_out + sum(unpriced.values(), type(evidence.left_out)())
    return Learning(answers, dict(left_out.most_common()))


def _earlier(
    pool: Pool, kept: Sequence[Calibration], used: Sequence[Use]
) -> tuple[Sequence[Calibration], Calibration | None]:
    """All calibrations of the pool's backend and accelerator, and the one in use."""
    where = (pool.backend, pool.accelerator)
    mine = [one for one in kept if (one.backend, one.accelerator) == where]
    named = [use.calibration_id for use in used if (use.backend, use.accelerator) == where][-1:]
    return mine, next((one for one in mine if one.id in named), None)


def _answer(
    pool: Pool, earlier: Sequence[Calibration], before: Calibration | None, now: float, dry_run: bool
) -> Answer:
    made_at = max(now, float(int(earlier[-1].made_at)) + 1.0) if earlier else now  # ids tell seconds
    outcome = learn(pool, before, made_at, __version__, estimator_digest())
    if outcome.found is not None and before is not None and _same(outcome.found, before):
        return Answer(outcome, "unchanged", f"nothing is new since {before.id}", before)
    if outcome.refused is not None:
        return Answer(outcome, "refused", outcome.refused, before)
    return Answer(outcome, "not taken" if dry_run else "taken", "--dry-run" if dry_run else None, before)


def _same(found: Calibration, before: Calibration) -> bool:
    return (found.data.digest, found.estimator) == (before.data.digest, before.estimator)


def _take(store: Store, taken: list[Answer], now: float) -> None:
    with store.write() as connection:
        for answer in taken:
            one = answer.outcome.found
            if one is None:
                raise ValueError("nothing was found to be taken")
            if in_use(connection, one.backend, one.accelerator) != answer.before:
                raise UserError("another `llmlaunch calibrate` was faster; look at `llmlaunch calibrate list`")
            put(connection, one)
            use(connection, one.backend, one.accelerator, one.id, now)


def _none_such(backend: str | None, accelerator: str | None, found: list[Pool]) -> str:
    asked = " on ".join(word for word in (backend, accelerator) if word)
    known = ", ".join(f"{one.backend} on {one.accelerator}" for one in found) or "none"
    return f"calibrate: the store holds no run of {asked} that could be priced; it holds: {known}"
