"""Calibrations in the store: learned from all its runs, every version kept, and which one was in use since when."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, Select, Table, or_, select, text

from llmlaunch import __version__
from llmlaunch.calibration.calibrations import Calibration, calibration_of_json, estimator_digest
from llmlaunch.calibration.learning import LearningResult, learn
from llmlaunch.calibration.pool import NOT_OF_A_DEVICE, Pool, gather, pools
from llmlaunch.calibration.records import TABLES
from llmlaunch.cluster.cards import machines
from llmlaunch.errors import UserError
from llmlaunch.store.database import Store
from llmlaunch.store.reading import IN_USE, NAMED
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
    "use",
    "uses",
]

AT_ONCE = 2000


@dataclass(frozen=True)
class Use:
    """From `since` (unix seconds) on predictions for the backend and accelerator took this calibration, or none."""

    backend: str
    accelerator: str
    calibration_id: str | None
    since: float


@dataclass(frozen=True)
class Answer:
    """What came of one backend and accelerator. `did` is `taken`, `refused`, `unchanged`, or `not taken` in a dry run;
    `why` is why it was not taken. `before` is what was in use."""

    result: LearningResult
    did: str
    why: str | None
    before: Calibration | None

    def as_json(self) -> dict[str, Any]:
        calibration, before = self.result.calibration, self.before
        return {
            **{name: getattr(self.result, name) for name in ("backend", "accelerator", "runs", "died")},
            "did": self.did,
            "why": self.why,
            "before": None if before is None else before.id,
            "calibration": None if calibration is None else calibration.as_json(),
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
    """Learn a calibration for every backend and accelerator in the store, or for those named, and use those that are no
    worse. `now` is in unix seconds.

    Raises UserError: no run is of those named, or another `calibrate` was faster.
    """
    table = None if backend is None else TABLES.get(backend, backend)
    with store.read() as connection:  # ended before anything is worked out: on SQLite it keeps writers waiting
        configurations, left_out = gather(_records_of_devices(connection))
        kept_calibrations, all_uses = all_calibrations(connection), uses(connection)
    all_pools, unpriced = pools(configurations, machines())
    wanted = [pool for pool in all_pools if table in (None, pool.backend) and accelerator in (None, pool.accelerator)]
    if not wanted and (backend or accelerator):
        raise UserError(_no_such_runs(backend, accelerator, all_pools))
    answers = tuple(_answer(pool, *_earlier(pool, kept_calibrations, all_uses), now, dry_run) for pool in wanted)
    with_calibration = [answer for answer in answers if answer.did == "taken"]
    if with_calibration:
        _use_all(store, with_calibration, now)
    return Learning(answers, dict((left_out + unpriced).most_common()))


def _records_of_devices(connection: Connection) -> Iterator[dict[str, Any]]:
    """Yield every measurement that may tell what a device needs, the newest first, one after the other: 100,000 of them
    are 400 MB."""
    kind = measurements.c.peak_kind
    wanted = (
        select(measurements.c.content)
        .where(or_(kind.is_(None), kind.not_in(NOT_OF_A_DEVICE)))
        .order_by(measurements.c.position.desc())
        .execution_options(yield_per=AT_ONCE)
    )
    for content in connection.execute(wanted).scalars():
        yield json.loads(content)


def _no_such_runs(backend: str | None, accelerator: str | None, all_pools: list[Pool]) -> str:
    named = " on ".join(name for name in (backend, accelerator) if name)
    listed = ", ".join(f"{pool.backend} on {pool.accelerator}" for pool in all_pools) or "none"
    return f"calibrate: the store holds no run of {named} that could be priced; it holds: {listed}"


def _earlier(
    pool: Pool, kept_calibrations: Sequence[Calibration], all_uses: Sequence[Use]
) -> tuple[Sequence[Calibration], Calibration | None]:
    """Return all calibrations of the pool's backend and accelerator, and the one in use."""
    key = (pool.backend, pool.accelerator)
    own = [calibration for calibration in kept_calibrations if (calibration.backend, calibration.accelerator) == key]
    named = [use.calibration_id for use in all_uses if (use.backend, use.accelerator) == key][-1:]
    return own, next((calibration for calibration in own if calibration.id in named), None)


def _answer(
    pool: Pool, earlier: Sequence[Calibration], before: Calibration | None, now: float, dry_run: bool
) -> Answer:
    made_at = max(now, float(int(earlier[-1].made_at)) + 1.0) if earlier else now  # ids tell seconds
    result = learn(pool, before, made_at, __version__, estimator_digest())
    if result.calibration is not None and before is not None and _same(result.calibration, before):
        return Answer(result, "unchanged", f"nothing is new since {before.id}", before)
    if result.refusal is not None:
        return Answer(result, "refused", result.refusal, before)
    return Answer(result, "not taken" if dry_run else "taken", "--dry-run" if dry_run else None, before)


def _same(calibration: Calibration, before: Calibration) -> bool:
    return (calibration.data.digest, calibration.estimator) == (before.data.digest, before.estimator)


def _use_all(store: Store, answers: list[Answer], now: float) -> None:
    with store.write() as connection:
        for answer in answers:
            new = answer.result.calibration
            if new is None:
                raise ValueError("an answer without a calibration cannot be used")
            if in_use(connection, new.backend, new.accelerator) != answer.before:
                raise UserError("another `llmlaunch calibrate` was faster; look at `llmlaunch calibrate list`")
            put(connection, new)
            use(connection, new.backend, new.accelerator, new.id, now)


def put(connection: Connection, calibration: Calibration) -> None:
    """Keep a calibration, inside the caller's transaction as all of these; nothing uses it yet."""
    row = {name: getattr(calibration, name) for name in ("id", "backend", "accelerator", "made_at")}
    content = json.dumps(calibration.as_json(), separators=(",", ":"), allow_nan=False)
    connection.execute(calibrations.insert(), {**row, "content": content})


def use(connection: Connection, backend: str, accelerator: str, calibration_id: str | None, now: float) -> None:
    """Use this calibration, or none, from `now` on. What was in use before stays on record.

    Raises UserError: there is no such calibration, or it is of another backend or accelerator.
    """
    if calibration_id is not None:
        named = find_calibration(connection, calibration_id)
        if (named.backend, named.accelerator) != (backend, accelerator):
            raise UserError(
                f"{calibration_id} is of {named.backend} on {named.accelerator}, not {backend} on {accelerator}"
            )
    connection.execute(calibration_uses.insert(), asdict(Use(backend, accelerator, calibration_id, now)))


def in_use(connection: Connection, backend: str, accelerator: str) -> Calibration | None:
    """Return the calibration that predictions for `backend` (a value of TABLES) on `accelerator` take now."""
    content = connection.execute(text(IN_USE), {"backend": backend, "accelerator": accelerator}).scalar()
    return None if content is None else calibration_of_json(json.loads(content))


def find_calibration(connection: Connection, calibration_id: str) -> Calibration:
    """Return a calibration by its id. Raises UserError: the store holds no such calibration."""
    content = connection.execute(text(NAMED), {"id": calibration_id}).scalar()
    if content is None:
        raise UserError(f"{calibration_id}: no such calibration; `llmlaunch calibrate list` shows all of them")
    return calibration_of_json(json.loads(content))


def all_calibrations(
    connection: Connection, backend: str | None = None, accelerator: str | None = None
) -> list[Calibration]:
    """Return every calibration, or those of a backend (a value of TABLES) and accelerator; the oldest first."""
    wanted = select(calibrations.c.content).order_by(calibrations.c.made_at, calibrations.c.id)
    rows = connection.execute(_restricted(wanted, calibrations, backend, accelerator))
    return [calibration_of_json(json.loads(content)) for content in rows.scalars()]


def uses(connection: Connection, backend: str | None = None, accelerator: str | None = None) -> Sequence[Use]:
    """Return what was in use since when, the oldest first."""
    wanted = select(*(calibration_uses.c[name] for name in Use.__dataclass_fields__)).order_by(calibration_uses.c.id)
    rows = connection.execute(_restricted(wanted, calibration_uses, backend, accelerator))
    return [Use(*row) for row in rows]


def _restricted(wanted: Select[Any], table: Table, backend: str | None, accelerator: str | None) -> Select[Any]:
    for column, value in ((table.c.backend, backend), (table.c.accelerator, accelerator)):
        if value is not None:
            wanted = wanted.where(column == value)
    return wanted
