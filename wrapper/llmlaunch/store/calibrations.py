"""Calibrations in the store, of memory and of step times: learned from all its runs, every version kept, and which one
was in use since when. Both kinds lie in the same tables; of step times `accelerator` is the machine of their class."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, Select, Table, func, or_, select, text

from llmlaunch import __version__
from llmlaunch.calibration.calibrations import Calibration, calibration_of_json, estimator_digest
from llmlaunch.calibration.learning import LearningResult, learn
from llmlaunch.calibration.pool import NOT_OF_A_DEVICE, Pool, gather, pools
from llmlaunch.calibration.records import TABLES
from llmlaunch.calibration.step_times import TimedRun, timed_runs
from llmlaunch.calibration.time_calibrations import (
    PREFIX,
    TimeCalibration,
    TimeClass,
    time_calibration_of_json,
    timing_digest,
)
from llmlaunch.calibration.time_learning import TimeLearningResult, learn_times
from llmlaunch.cluster.cards import machines
from llmlaunch.errors import UserError
from llmlaunch.progress import counting
from llmlaunch.store.database import Store
from llmlaunch.store.location import stored_as, stored_json
from llmlaunch.store.reading import IN_USE, NAMED
from llmlaunch.store.tables import calibration_uses, calibrations, measurements

__all__ = [
    "Answer",
    "Learning",
    "TimeAnswer",
    "Use",
    "all_calibrations",
    "all_time_calibrations",
    "calibrate",
    "find_calibration",
    "in_use",
    "key_of",
    "keys_in_use",
    "put",
    "use",
    "use_of",
    "uses",
]

AT_ONCE = 2000

AnyCalibration = Calibration | TimeCalibration


@dataclass(frozen=True)
class Use:
    """From `since` (unix seconds) on predictions for the backend and accelerator took this calibration, or none."""

    backend: str
    accelerator: str
    calibration_id: str | None
    since: float


@dataclass(frozen=True)
class TimeAnswer:
    """What came of the step times of one class of jobs, in the words of `Answer`."""

    result: TimeLearningResult
    did: str
    why: str | None
    before: TimeCalibration | None

    def as_json(self) -> dict[str, Any]:
        calibration, before = self.result.calibration, self.before
        return {
            "backend": self.result.backend,
            "machine": self.result.machine,
            "runs": self.result.runs,
            "did": self.did,
            "why": self.why,
            "before": None if before is None else before.id,
            "calibration": None if calibration is None else calibration.as_json(),
        }


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
    """All answers, of memory and of step times, and how many records were left out of memory's for which reason."""

    answers: tuple[Answer, ...]
    left_out: dict[str, int]
    times: tuple[TimeAnswer, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "answers": [answer.as_json() for answer in self.answers],
            "left_out": self.left_out,
            "step_times": [answer.as_json() for answer in self.times],
        }


def calibrate(
    store: Store, now: float, backend: str | None = None, accelerator: str | None = None, dry_run: bool = False
) -> Learning:
    """Learn a calibration of memory for every backend and accelerator in the store, or for those named, and one of step
    times for every class of jobs on them; use those that are no worse. `now` is in unix seconds.

    Raises UserError: no run is of those named, or another `calibrate` was faster.
    """
    table = None if backend is None else TABLES.get(backend, backend)
    with store.read() as connection:  # ended before anything is worked out: on SQLite it keeps writers waiting
        configurations, left_out = gather(_records_of_devices(connection))
        by_class, _ = timed_runs(_records_of_steps(connection), machines())
        kept_calibrations, all_uses = all_calibrations(connection), uses(connection)
        kept_times = all_time_calibrations(connection)
    all_pools, unpriced = pools(configurations, machines())
    wanted = [pool for pool in all_pools if table in (None, pool.backend) and accelerator in (None, pool.accelerator)]
    classes = [job for job in by_class if table in (None, job.backend) and accelerator in (None, job.accelerator)]
    if not wanted and not classes and (backend or accelerator):
        raise UserError(_no_such_runs(backend, accelerator, all_pools))
    answers = tuple(
        _answer(pool, *_earlier(pool, kept_calibrations, all_uses), now, dry_run)
        for pool in counting("classes", wanted)
    )
    times = tuple(
        _time_answer(job, by_class[job], kept_times, all_uses, now, dry_run)
        for job in sorted(classes, key=lambda job: job.key)
    )
    everything: tuple[Answer | TimeAnswer, ...] = (*answers, *times)
    with_calibration = [answer for answer in everything if answer.did == "taken"]
    if with_calibration:
        _use_all(store, with_calibration, now)
    return Learning(answers, dict((left_out + unpriced).most_common()), times)


def _records_of_steps(connection: Connection) -> Iterator[dict[str, Any]]:
    """Yield one record of each attempt that says on which machine its step was timed, the newest first: all records of
    an attempt have the same step time."""
    table = measurements.c
    newest = (
        select(func.max(table.position))
        .where(table.content.like('%"step_seconds"%'), table.content.like('%"machine"%'))
        .group_by(func.coalesce(table.run_id, table.id), table.attempt)
    )
    wanted = select(table.content).where(table.position.in_(newest)).order_by(table.position.desc())
    for content in connection.execute(wanted.execution_options(yield_per=AT_ONCE)).scalars():
        yield stored_json(content)


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
        yield stored_json(content)


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


def _time_answer(
    job: TimeClass,
    runs: Sequence[TimedRun],
    kept: Sequence[TimeCalibration],
    all_uses: Sequence[Use],
    now: float,
    dry_run: bool,
) -> TimeAnswer:
    own = [calibration for calibration in kept if (calibration.backend, calibration.machine) == job.key]
    named = [use.calibration_id for use in all_uses if (use.backend, use.accelerator) == job.key][-1:]
    before = next((calibration for calibration in own if calibration.id in named), None)
    made_at = max(now, float(int(own[-1].made_at)) + 1.0) if own else now
    result = learn_times(job, runs, before, made_at, __version__, timing_digest())
    new = result.calibration
    if new is not None and before is not None and (new.data, new.estimator) == (before.data, before.estimator):
        return TimeAnswer(result, "unchanged", f"nothing is new since {before.id}", before)
    if result.refusal is not None:
        return TimeAnswer(result, "refused", result.refusal, before)
    return TimeAnswer(result, "not taken" if dry_run else "taken", "--dry-run" if dry_run else None, before)


def _same(calibration: Calibration, before: Calibration) -> bool:
    return (calibration.data.digest, calibration.estimator) == (before.data.digest, before.estimator)


def _use_all(store: Store, answers: Sequence[Answer | TimeAnswer], now: float) -> None:
    with store.write() as connection:
        for answer in answers:
            new = answer.result.calibration
            if new is None:
                raise ValueError("an answer without a calibration cannot be used")
            if _in_use(connection, *key_of(new)) != answer.before:
                raise UserError("another `llmlaunch calibrate` was faster; look at `llmlaunch calibrate list`")
            put(connection, new)
            use(connection, *key_of(new), new.id, now)


def key_of(calibration: AnyCalibration) -> tuple[str, str]:
    """Return the backend and the accelerator, or the machine of step times, that a calibration is of."""
    if isinstance(calibration, TimeCalibration):
        return calibration.backend, calibration.machine
    return calibration.backend, calibration.accelerator


def put(connection: Connection, calibration: AnyCalibration) -> None:
    """Keep a calibration, inside the caller's transaction as all of these; nothing uses it yet."""
    backend, accelerator = key_of(calibration)
    row = {"id": calibration.id, "backend": backend, "accelerator": accelerator, "made_at": calibration.made_at}
    content = json.dumps(calibration.as_json(), separators=(",", ":"), allow_nan=False)
    connection.execute(calibrations.insert(), {**row, "content": content})


def use(connection: Connection, backend: str, accelerator: str, calibration_id: str | None, now: float) -> None:
    """Use this calibration, or none, from `now` on. What was in use before stays on record.

    Raises UserError: there is no such calibration, or it is of another backend or accelerator.
    """
    if calibration_id is not None:
        key = key_of(find_calibration(connection, calibration_id))
        if key != (backend, accelerator):
            raise UserError(f"{calibration_id} is of {' on '.join(key)}, not {backend} on {accelerator}")
    connection.execute(calibration_uses.insert(), asdict(Use(backend, accelerator, calibration_id, now)))


def in_use(connection: Connection, backend: str, accelerator: str) -> Calibration | None:
    """Return the calibration that predictions for `backend` (a value of TABLES) on `accelerator` take now."""
    calibration = _in_use(connection, backend, accelerator)
    return calibration if isinstance(calibration, Calibration) else None


def use_of(connection: Connection, backend: str, accelerator: str) -> str | None:
    """Return the id of what is in use for a backend and an accelerator, or a machine of step times; None for none."""
    calibration = _in_use(connection, backend, accelerator)
    return None if calibration is None else calibration.id


def keys_in_use(connection: Connection, backend: str, accelerator: str) -> list[tuple[str, str]]:
    """Return the keys of all that is in use for a backend on an accelerator, that of memory first."""
    keys = dict.fromkeys((use.backend, use.accelerator) for use in uses(connection, backend))
    mine = [key for key in keys if key[1] == accelerator or f" {accelerator} " in key[1]]
    return sorted((key for key in mine if use_of(connection, *key) is not None), key=lambda key: key[1] != accelerator)


def _in_use(connection: Connection, backend: str, accelerator: str) -> AnyCalibration | None:
    content = connection.execute(text(IN_USE), {"backend": backend, "accelerator": accelerator}).scalar()
    return None if content is None else _of_json(content)


def _of_json(content: str) -> AnyCalibration:
    of_times = str(stored_json(content).get("id")).startswith(PREFIX)
    return stored_as(content, time_calibration_of_json) if of_times else stored_as(content, calibration_of_json)


def find_calibration(connection: Connection, calibration_id: str) -> AnyCalibration:
    """Return a calibration by its id. Raises UserError: the store holds no such calibration."""
    content = connection.execute(text(NAMED), {"id": calibration_id}).scalar()
    if content is None:
        raise UserError(f"{calibration_id}: no such calibration; `llmlaunch calibrate list` shows all of them")
    return _of_json(content)


def all_calibrations(
    connection: Connection, backend: str | None = None, accelerator: str | None = None
) -> list[Calibration]:
    """Return every calibration of memory, or those of a backend (a value of TABLES) and accelerator; the oldest
    first."""
    wanted = select(calibrations.c.content).order_by(calibrations.c.made_at, calibrations.c.id)
    wanted = wanted.where(calibrations.c.id.not_like(f"{PREFIX}%"))
    rows = connection.execute(_restricted(wanted, calibrations, backend, accelerator))
    return [stored_as(content, calibration_of_json) for content in rows.scalars()]


def all_time_calibrations(connection: Connection, backend: str | None = None) -> list[TimeCalibration]:
    """Return every calibration of step times, or those of a backend (a value of TABLES); the oldest first."""
    wanted = select(calibrations.c.content).order_by(calibrations.c.made_at, calibrations.c.id)
    rows = connection.execute(
        _restricted(wanted.where(calibrations.c.id.like(f"{PREFIX}%")), calibrations, backend, None)
    )
    return [stored_as(content, time_calibration_of_json) for content in rows.scalars()]


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
