"""Learn from all runs in the store, and take what is no worse into use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmlaunch import __version__
from llmlaunch.calibration.calibrations import Calibration
from llmlaunch.calibration.digest import estimator_digest
from llmlaunch.calibration.evidence import gather
from llmlaunch.calibration.learning import Outcome, learn
from llmlaunch.calibration.machines import clusters_by_gpu
from llmlaunch.calibration.pool import Pool, pools
from llmlaunch.calibration.records import TABLES
from llmlaunch.errors import UserError
from llmlaunch.store.calibrations import Use, all_calibrations, in_use, put, records_of_devices, use, uses
from llmlaunch.store.database import Store

__all__ = ["Answer", "Learning", "calibrate"]


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
