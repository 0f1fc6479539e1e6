"""Calibrations in the store, of memory and of step times: learned from all its runs, every version kept, and which one
was in use since when. Both kinds lie in the same tables; of step times `accelerator` is
the class of jobs in words."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from sqlalchemy import Connection, func, or_, select, text

from llmlaunch import __version__
from llmlaunch.calibration.calibrations import (
    MEMORY,
    TIME,
    Calibration,
    Quantity,
    calibration_of_json,
    estimator_digest,
)
from llmlaunch.calibration.factors import TimedRuns
from llmlaunch.calibration.learning import LearningResult, MeasuredRuns, learn
from llmlaunch.calibration.peaks import peak_runs
from llmlaunch.calibration.pool import NOT_OF_A_DEVICE, Pool, gather, pools
from llmlaunch.calibration.records import TimeClass
from llmlaunch.calibration.step_times import TimedRun, timed_runs
from llmlaunch.cluster.cards import machines
from llmlaunch.errors import UserError
from llmlaunch.frameworks.recorded import TABLES
from llmlaunch.progress import counting
from llmlaunch.store.database import Store
from llmlaunch.store.location import stored_as, stored_json
from llmlaunch.store.reading import IN_USE, NAMED
from llmlaunch.store.tables import calibration_uses, calibrations, measurements

AT_ONCE = 2000

Key = tuple[str, str]
"""The backend and the accelerator of a calibration."""


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
    before: Calibration[Any] | None

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
    """All answers, those of memory first, and how many records were left out of memory's for which reason."""

    answers: tuple[Answer, ...]
    left_out: dict[str, int]

    def of(self, quantity: Quantity[Any]) -> list[Answer]:
        return [answer for answer in self.answers if answer.result.quantity is quantity]

    def as_json(self) -> dict[str, Any]:
        return {
            "answers": [answer.as_json() for answer in self.of(MEMORY)],
            "left_out": self.left_out,
            "step_times": [answer.as_json() for answer in self.of(TIME)],
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
        kept, all_uses = all_calibrations(connection), uses(connection)
    all_pools, unpriced = pools(configurations, machines())
    wanted = [pool for pool in all_pools if table in (None, pool.backend) and accelerator in (None, pool.accelerator)]
    classes = [job for job in by_class if table in (None, job.backend) and accelerator in (None, job.accelerator)]
    if not wanted and not classes and (backend or accelerator):
        raise UserError(_no_such_runs(backend, accelerator, all_pools))
    makers: list[tuple[Key, Callable[[Calibration[Any] | None], MeasuredRuns[Any]]]] = [
        *(((pool.backend, pool.accelerator), partial(peak_runs, pool)) for pool in wanted),
        *((job.key, partial(_timed, job, by_class[job])) for job in sorted(classes, key=lambda job: job.key)),
    ]
    answers = []
    for key, make in counting("classes", makers):
        before = _in_use_of(key, kept, all_uses)
        latest = max((calibration.made_at for calibration in kept if key_of(calibration) == key), default=None)
        made_at = now if latest is None else max(now, float(int(latest)) + 1.0)  # ids tell seconds
        answers.append(_answer(make(before), before, made_at, dry_run))
    taken = [answer for answer in answers if answer.did == "taken"]
    if taken:
        _use_all(store, taken, now)
    return Learning(tuple(answers), dict((left_out + unpriced).most_common()))


def _timed(job: TimeClass, runs: Sequence[TimedRun], before: Calibration[Any] | None) -> TimedRuns:
    return TimedRuns(job, runs)


def _in_use_of(key: Key, kept: Sequence[Calibration[Any]], all_uses: Sequence[Use]) -> Calibration[Any] | None:
    named = [use.calibration_id for use in all_uses if (use.backend, use.accelerator) == key][-1:]
    return next((calibration for calibration in kept if calibration.id in named), None)


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


def _answer(measured: MeasuredRuns[Any], before: Calibration[Any] | None, made_at: float, dry_run: bool) -> Answer:
    result = learn(measured, before, made_at, __version__, estimator_digest(measured.quantity))
    if result.calibration is not None and before is not None and _same(result.calibration, before):
        return Answer(result, "unchanged", f"nothing is new since {before.id}", before)
    if result.refusal is not None:
        return Answer(result, "refused", result.refusal, before)
    return Answer(result, "not taken" if dry_run else "taken", "--dry-run" if dry_run else None, before)


def _same(calibration: Calibration[Any], before: Calibration[Any]) -> bool:
    return (calibration.data.digest, calibration.estimator) == (before.data.digest, before.estimator)


def _use_all(store: Store, answers: Sequence[Answer], now: float) -> None:
    with store.write() as connection:
        for answer in answers:
            new = answer.result.calibration
            if new is None:
                raise ValueError("an answer without a calibration cannot be used")
            if in_use(connection, *key_of(new)) != answer.before:
                raise UserError("another `llmlaunch calibrate` was faster; look at `llmlaunch calibrate list`")
            put(connection, new)
            use(connection, *key_of(new), new.id, now)


def key_of(calibration: Calibration[Any]) -> Key:
    return calibration.backend, calibration.accelerator


def put(connection: Connection, calibration: Calibration[Any]) -> None:
    """Keep a calibration, inside the caller's transaction as all of these; nothing uses it yet."""
    row = {name: getattr(calibration, name) for name in ("id", "backend", "accelerator", "made_at")}
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


def in_use(connection: Connection, backend: str, accelerator: str) -> Calibration[Any] | None:
    """Return the calibration that predictions for `backend` (a value of TABLES) on `accelerator` take now."""
    content = connection.execute(text(IN_USE), {"backend": backend, "accelerator": accelerator}).scalar()
    return None if content is None else stored_as(content, calibration_of_json)


def use_of(connection: Connection, backend: str, accelerator: str) -> str | None:
    """Return the id of what is in use for a backend and an accelerator; None for none."""
    calibration = in_use(connection, backend, accelerator)
    return None if calibration is None else calibration.id


def keys_in_use(connection: Connection, backend: str, accelerator: str) -> list[Key]:
    """Return the keys of all that is in use for a backend on an accelerator, that of memory first."""
    keys = dict.fromkeys((use.backend, use.accelerator) for use in uses(connection, backend))
    mine = [key for key in keys if is_on(key, accelerator)]
    return sorted((key for key in mine if use_of(connection, *key) is not None), key=lambda key: key[1] != accelerator)


def is_on(key: Key, accelerator: str) -> bool:
    """Whether a key is of an accelerator: of its memory, or of step times on a machine of it."""
    return key[1] == accelerator or f" {accelerator} " in key[1]


def find_calibration(connection: Connection, calibration_id: str) -> Calibration[Any]:
    """Return a calibration by its id. Raises UserError: the store holds no such calibration."""
    content = connection.execute(text(NAMED), {"id": calibration_id}).scalar()
    if content is None:
        raise UserError(f"{calibration_id}: no such calibration; `llmlaunch calibrate list` shows all of them")
    return stored_as(content, calibration_of_json)


def all_calibrations(
    connection: Connection, backend: str | None = None, accelerator: str | None = None
) -> list[Calibration[Any]]:
    """Return every calibration, or those of a backend (a value of TABLES) and of machines with an accelerator; the
    oldest first."""
    wanted = select(calibrations.c.content).order_by(calibrations.c.made_at, calibrations.c.id)
    listed = [stored_as(content, calibration_of_json) for content in connection.execute(wanted).scalars()]
    return [
        entry
        for entry in listed
        if backend in (None, entry.backend) and (accelerator is None or is_on(key_of(entry), accelerator))
    ]


def uses(connection: Connection, backend: str | None = None) -> Sequence[Use]:
    """Return what was in use since when, of all backends or of one; the oldest first."""
    wanted = select(*(calibration_uses.c[name] for name in Use.__dataclass_fields__)).order_by(calibration_uses.c.id)
    listed = [Use(*row) for row in connection.execute(wanted)]
    return [entry for entry in listed if backend in (None, entry.backend)]
