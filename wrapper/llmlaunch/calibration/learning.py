"""A new calibration from a pool of runs, or why there is none. Pure: no store, no clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from llmlaunch.calibration.accuracy import RULE
from llmlaunch.calibration.calibrations import Calibration, Errors, Learned, calibration_id
from llmlaunch.calibration.pool import Pool
from llmlaunch.calibration.residual import PARTS, Equations, Parts, correction_of, equations_of
from llmlaunch.calibration.validation import (
    Scored,
    corrected,
    cross_validated,
    errors_of,
    scored,
    scores_of,
)
from llmlaunch.columns import FloatColumn
from llmlaunch.memory.correction import NO_CORRECTION

__all__ = ["FEWEST_RUNS", "Outcome", "learn"]

FEWEST_RUNS = 10  # that lived, with a known device or reserved peak
# What is worse by less is not worse: of the mean error, and of what a plan sets aside. What is in use was learned from
# some of the same runs and is not cross-validated on them; by about as much it looks better than it is.
ERROR_TOLERANCE, ROOM_TOLERANCE = 0.002, 0.005
SURE = 1.645  # standard errors: a gain that chance gives once in twenty


@dataclass(frozen=True)
class Outcome:
    """What came of a pool. `found` is None where there were too few runs; `refused` is a sentence without a full stop
    where `found` must not be used, None where it may."""

    backend: str
    accelerator: str
    runs: int
    died: int
    found: Calibration | None
    refused: str | None


def learn(pool: Pool, before: Calibration | None, made_at: float, llmlaunch: str, estimator: str) -> Outcome:
    """`before` is what predictions take now; `llmlaunch` and `estimator` say which program learned. A run counts that
    somebody could have planned: predicted within its card, without any correction or by the one in use."""
    old = NO_CORRECTION if before is None else before.correction
    nothing = corrected(pool, NO_CORRECTION)
    plain, by_old = scored(pool, nothing), scored(pool, corrected(pool, old))
    died = np.array([run.died for run in pool.runs])
    within = ~(np.fmin(plain.share, by_old.share) * RULE > 1.0)
    chosen = within & (died | np.isfinite(plain.worst))
    lived = chosen & ~died & np.isfinite(plain.typical)
    outcome = Outcome(pool.backend, pool.accelerator, int(np.sum(chosen)), int(np.sum(chosen & died)), None, None)
    if np.sum(lived) < FEWEST_RUNS:
        return replace(outcome, refused=_too_few(int(np.sum(lived)), outcome.died))
    found = _calibration(pool, chosen, errors_of(pool, by_old, chosen), made_at, llmlaunch, estimator)
    return replace(outcome, found=found, refused=_worse(found.before, found.after))


def _calibration(
    pool: Pool, chosen: NDArray[np.bool_], before: Errors, made_at: float, llmlaunch: str, estimator: str
) -> Calibration:
    """Learned from the chosen runs. Runs of one model are no ground to promise other models less: `only_up`."""
    equations = equations_of(pool).of(chosen)
    only_up = len({run.model for run, counts in zip(pool.runs, chosen, strict=True) if counts}) == 1
    parts = _chosen_parts(pool, equations, chosen, only_up)
    by_new = scored(pool, cross_validated(pool, equations, parts, only_up))
    new_id = calibration_id(pool.backend, pool.accelerator, made_at)
    return Calibration(
        id=new_id,
        backend=pool.backend,
        accelerator=pool.accelerator,
        made_at=made_at,
        llmlaunch=llmlaunch,
        estimator=estimator,
        data=_learned(pool, chosen),
        correction=replace(correction_of(equations, parts, only_up), calibration_id=new_id),
        before=before,
        after=errors_of(pool, by_new, chosen),
        scores=tuple(scores_of(pool, by_new, chosen)),
    )


def _chosen_parts(pool: Pool, equations: Equations, chosen: NDArray[np.bool_], only_up: bool) -> Parts:
    """The plainest correction that predicts runs of models it has not seen no worse than any other does. More is taken
    only where the mean loss falls by more than chance explains."""
    models = np.array([run.model for run in pool.runs])[chosen]
    losses = {parts: _loss(scored(pool, cross_validated(pool, equations, parts, only_up)))[chosen] for parts in PARTS}
    best = PARTS[0]
    for parts in sorted(PARTS[1:], key=lambda parts: (sum(parts), float(np.mean(losses[parts])))):
        if sum(parts) > sum(best) and _gains(losses[best] - losses[parts], models):
            best = parts
    return best


def _loss(found: Scored) -> FloatColumn:
    """How far each prediction is off, as a logarithm; of a run that died, how far it is below what was needed."""
    return np.where(np.isfinite(found.typical), np.abs(np.log(found.typical)), found.short)


def _gains(gain: FloatColumn, models: NDArray[np.str_]) -> bool:
    """Whether the mean is SURE standard errors above nothing. They are taken over models: what two runs of one model
    gain is not two witnesses."""
    groups = np.unique(models, return_inverse=True)[1]
    if groups.max(initial=0) == 0:
        groups = np.arange(len(gain))
    sums = np.bincount(groups, weights=gain - np.mean(gain))
    error = float(np.sqrt(np.sum(sums**2) * len(sums) / (len(sums) - 1))) / len(gain)
    return float(np.mean(gain)) > max(SURE * error, 1e-6)


def _learned(pool: Pool, chosen: NDArray[np.bool_]) -> Learned:
    runs = [run for run, counts in zip(pool.runs, chosen, strict=True) if counts]
    said = sorted(line for run in runs for line in run.said)
    return Learned(
        runs=len(runs),
        records=len(said),
        died=sum(run.died for run in runs),
        digest=sha256("\n".join(said).encode()).hexdigest(),
        families=dict(sorted(Counter(run.family for run in runs).items())),
        versions=dict(sorted(Counter(run.version or "unknown" for run in runs).items())),
    )


def _too_few(lived: int, died: int) -> str:
    beside = f", beside {died} that ran out of memory" if died else ""
    return (
        f"{FEWEST_RUNS} runs are needed that succeeded and whose device or reserved peak is known; the store holds "
        f"{lived}{beside}"
    )


def _worse(before: Errors, after: Errors) -> str | None:
    """What would be worse than what is in use, in a sentence."""
    if after.mape > before.mape + ERROR_TOLERANCE:
        return f"the cross-validated error would rise from {100 * before.mape:.1f} to {100 * after.mape:.1f} %"
    for old, new in zip(before.bounds, after.bounds, strict=True):
        if old.room is None:
            continue
        if new.room is None:
            return f"at risk {new.risk:g} there would be no bound any more"
        if new.room > old.room + ROOM_TOLERANCE:
            return (
                f"at risk {new.risk:g} a plan would have to set aside {new.room:.3f} times what runs use, and now "
                f"{old.room:.3f} times"
            )
    return None
