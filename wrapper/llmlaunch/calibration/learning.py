"""A new calibration from a pool of runs, or why there is none. Pure: no store, no clock.

Errors are of predictions with a correction that never saw the run's model: runs are left out by model, all
configurations of it at once, because what is to be predicted next is a layout or a model that has not run. If all runs
are of one model they are left out by configuration, which tells nothing of other models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from llmlaunch.calibration.calibrations import Calibration, Errors, TrainingData, calibration_id
from llmlaunch.calibration.margins import (
    BOUNDING,
    DIED,
    FUJII_SHARE,
    RISKS,
    Bound,
    Score,
    bound_at,
    runs_needed,
    scores_of_best_kind,
)
from llmlaunch.calibration.pool import DEVICE, Peaks, Pool, PooledRun, gather, pools
from llmlaunch.calibration.records import Record, table_of
from llmlaunch.calibration.residual import PARTS, Equations, Parts, correction_of, equations_of
from llmlaunch.cluster.profile import Cluster
from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.memory.job import NO_CORRECTION, Correction

__all__ = [
    "FEWEST_RUNS",
    "LearningResult",
    "errors_of",
    "folds_of",
    "gains",
    "learn",
    "score_runs",
    "scores_of_records",
    "uniform",
]

FEWEST_RUNS = 10  # that lived, with a known device or reserved peak
MOST_FOLDS = 10
# Differences of the mean error, and of what a plan sets aside, that do not count. What is in use was learned from some
# of the same runs and is not cross-validated on them; by about as much it looks better than it is.
ERROR_TOLERANCE, ROOM_TOLERANCE = 0.002, 0.005
SURE = 1.645  # standard errors: a gain that chance gives once in twenty


@dataclass(frozen=True)
class LearningResult:
    """What came of a pool. `calibration` is None if there were too few runs. `refusal` is a sentence without a full
    stop if the calibration must not be used, None if it may."""

    backend: str
    accelerator: str
    runs: int
    died: int
    calibration: Calibration | None
    refusal: str | None


@dataclass(frozen=True)
class RunCorrections:
    """The correction by which each run of a pool is predicted, one number a run."""

    torch_share: FloatColumn
    outside_bytes: FloatColumn


@dataclass(frozen=True)
class RunScores:
    """One number a run: measured / predicted of its device peak, or of its reserved peak with the predicted bytes
    outside (`kind` is the index in BOUNDING), by the highest of its repeats and by their median; NaN if neither peak is
    known. `shortfall` is the logarithm of what a run that died needed at least over its prediction."""

    kind: IntColumn
    worst: FloatColumn
    typical: FloatColumn
    shortfall: FloatColumn
    share: FloatColumn  # predicted, of the rule's limit; NaN if the card is not known


def learn(pool: Pool, before: Calibration | None, made_at: float, llmlaunch: str, estimator: str) -> LearningResult:
    """Learn from the runs that somebody could have planned: predicted within their card without any correction or by
    the one in use. `before` is the calibration in use; `llmlaunch` and `estimator` name the program that learns."""
    plain = score_runs(pool, uniform(pool, NO_CORRECTION))
    in_use = score_runs(pool, uniform(pool, NO_CORRECTION if before is None else before.correction))
    died = np.array([run.died for run in pool.runs])
    within = ~(np.fmin(plain.share, in_use.share) * FUJII_SHARE > 1.0)
    chosen = within & (died | np.isfinite(plain.worst))
    lived = int(np.sum(chosen & ~died & np.isfinite(plain.typical)))
    result = LearningResult(pool.backend, pool.accelerator, int(np.sum(chosen)), int(np.sum(chosen & died)), None, None)
    if lived < FEWEST_RUNS:
        return replace(result, refusal=_too_few(lived, result.died))
    calibration = _calibration(pool, chosen, errors_of(pool, in_use, chosen), made_at, llmlaunch, estimator)
    return replace(result, calibration=calibration, refusal=_regression(calibration.before, calibration.after))


def _calibration(
    pool: Pool, chosen: NDArray[np.bool_], before: Errors, made_at: float, llmlaunch: str, estimator: str
) -> Calibration:
    """Runs of one model are no ground to promise other models less: then no part may be negative (`only_up`)."""
    equations = equations_of(pool).of(chosen)
    runs = [run for run, counts in zip(pool.runs, chosen, strict=True) if counts]
    only_up = len({run.model for run in runs}) == 1
    parts = _best_parts(pool, equations, chosen, only_up)
    scores = score_runs(pool, cross_validated(pool, equations, parts, only_up))
    new_id = calibration_id(pool.backend, pool.accelerator, made_at)
    return Calibration(
        id=new_id,
        backend=pool.backend,
        accelerator=pool.accelerator,
        made_at=made_at,
        llmlaunch=llmlaunch,
        estimator=estimator,
        data=_training_data(runs),
        correction=replace(correction_of(equations, parts, only_up), calibration_id=new_id),
        before=before,
        after=errors_of(pool, scores, chosen),
        scores=tuple(scores_of_runs(pool, scores, chosen)),
    )


def _best_parts(pool: Pool, equations: Equations, chosen: NDArray[np.bool_], only_up: bool) -> Parts:
    """Return the plainest correction that predicts runs of unseen models no worse than any other does. More parts are
    learned only if the mean loss falls by more than chance explains."""
    models = np.array([run.model for run in pool.runs])[chosen]
    losses = {
        parts: _loss(score_runs(pool, cross_validated(pool, equations, parts, only_up)))[chosen] for parts in PARTS
    }
    best = PARTS[0]
    for parts in sorted(PARTS[1:], key=lambda parts: (sum(parts), float(np.mean(losses[parts])))):
        if sum(parts) > sum(best) and gains(losses[best] - losses[parts], models):
            best = parts
    return best


def _loss(scores: RunScores) -> FloatColumn:
    """Return how far each prediction is off, as a logarithm; of a run that died, how far it is below what was
    needed."""
    return np.where(np.isfinite(scores.typical), np.abs(np.log(scores.typical)), scores.shortfall)


def gains(gain: FloatColumn, models: NDArray[np.str_]) -> bool:
    """Whether the mean is SURE standard errors above zero. They are taken over models: two runs of one model are not
    two witnesses."""
    groups = np.unique(models, return_inverse=True)[1]
    if groups.max(initial=0) == 0:
        groups = np.arange(len(gain))
    sums = np.bincount(groups, weights=gain - np.mean(gain))
    error = float(np.sqrt(np.sum(sums**2) * len(sums) / (len(sums) - 1))) / len(gain)
    return float(np.mean(gain)) > max(SURE * error, 1e-6)


def _training_data(runs: Sequence[PooledRun]) -> TrainingData:
    lines = sorted(line for run in runs for line in run.lines)
    return TrainingData(
        runs=len(runs),
        records=len(lines),
        died=sum(run.died for run in runs),
        digest=sha256("\n".join(lines).encode()).hexdigest(),
        families=dict(sorted(Counter(run.family for run in runs).items())),
        versions=dict(sorted(Counter(run.version or "unknown" for run in runs).items())),
    )


def _too_few(lived: int, died: int) -> str:
    beside = f", beside {died} that ran out of memory" if died else ""
    return (
        f"{FEWEST_RUNS} runs are needed that succeeded and whose device or reserved peak is known; the store holds "
        f"{lived}{beside}"
    )


def _regression(before: Errors, after: Errors) -> str | None:
    """Return in a sentence what would be worse than with the calibration in use, None if nothing would."""
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


def uniform(pool: Pool, correction: Correction) -> RunCorrections:
    """Return the same correction for every run."""
    return RunCorrections(np.full(len(pool), correction.torch_share), np.full(len(pool), correction.outside_bytes))


def cross_validated(pool: Pool, equations: Equations, parts: Parts, only_up: bool) -> RunCorrections:
    """Return for each run the correction learned from the runs of the other folds."""
    folds = folds_of([run.model for run in pool.runs])
    share, outside = np.zeros(len(pool)), np.zeros(len(pool))
    for fold in np.unique(folds):
        inside = folds == fold
        correction = correction_of(equations.of(~inside), parts, only_up)
        share[inside], outside[inside] = correction.torch_share, correction.outside_bytes
    return RunCorrections(share, outside)


def folds_of(models: Sequence[str]) -> IntColumn:
    """Return the fold of each run: whole models, spread evenly over at most MOST_FOLDS, the largest first."""
    if len(set(models)) == 1:
        return np.arange(len(models)) % MOST_FOLDS
    names, counts = np.unique(np.array(models), return_counts=True)
    sizes = np.zeros(min(MOST_FOLDS, len(names)), dtype=np.int64)
    fold = {}
    for index in np.argsort(-counts, kind="stable"):
        fold[str(names[index])] = smallest = int(np.argmin(sizes))
        sizes[smallest] += counts[index]
    return np.array([fold[model] for model in models])


def score_runs(pool: Pool, corrections: RunCorrections) -> RunScores:
    """Score each run of a pool by its own correction."""
    kind = np.full(len(pool), -1)
    worst, typical = np.full(len(pool), np.nan), np.full(len(pool), np.nan)
    shortfall = np.zeros(len(pool))
    for index, quantity in reversed(list(enumerate(BOUNDING))):  # device last: it is preferred
        peaks = pool.peaks[quantity]
        torch, outside = _corrected(peaks.reserved, peaks.outside, peaks.runs, corrections)
        beside = np.zeros(len(torch)) if quantity == DEVICE else outside  # was not measured
        highest = _highest_ratio(peaks, torch + outside, peaks.worst + beside, len(pool))
        kind[~np.isnan(highest)] = index
        worst = np.where(np.isnan(highest), worst, highest)
        usual = _highest_ratio(peaks, torch + outside, peaks.typical + beside, len(pool))
        typical = np.where(np.isnan(usual), typical, usual)
        needed = peaks.needed
        lacking = np.log(np.maximum(peaks.worst, 1.0) / np.maximum(torch + (quantity == DEVICE) * outside, 1.0))
        np.maximum.at(shortfall, peaks.runs[needed], lacking[needed])
    return RunScores(kind, worst, typical, shortfall, _limit_shares(pool, corrections))


def _corrected(
    reserved: FloatColumn, outside: FloatColumn, runs: IntColumn, corrections: RunCorrections
) -> tuple[FloatColumn, FloatColumn]:
    """Return torch's bytes and those outside (`memory.job.Correction`)."""
    return (
        reserved * (1.0 + corrections.torch_share[runs]),
        np.maximum(outside + corrections.outside_bytes[runs], 0.0),
    )


def _highest_ratio(peaks: Peaks, predicted: FloatColumn, measured: FloatColumn, runs: int) -> FloatColumn:
    """Return for each run the highest measured of its stages over the highest predicted of the same stages; NaN for a
    run that has none."""
    known = ~peaks.needed & np.isfinite(measured)
    top_measured, top_predicted = np.full(runs, -np.inf), np.full(runs, 1.0)
    np.maximum.at(top_measured, peaks.runs[known], measured[known])
    np.maximum.at(top_predicted, peaks.runs[known], predicted[known])
    return np.where(np.isfinite(top_measured), top_measured / top_predicted, np.nan)


def _limit_shares(pool: Pool, corrections: RunCorrections) -> FloatColumn:
    sizes = np.diff([*pool.starts, len(pool.reserved)])
    torch, outside = _corrected(pool.reserved, pool.outside, np.repeat(np.arange(len(pool)), sizes), corrections)
    cards = np.array([run.card_bytes or np.nan for run in pool.runs], dtype=np.float64)
    return np.asarray(np.maximum.reduceat(torch + outside, pool.starts) / (FUJII_SHARE * cards))


def scores_of_runs(pool: Pool, scores: RunScores, chosen: NDArray[np.bool_]) -> list[Score]:
    """Return the scores of the chosen runs that are not predicted above their card, because no plan is ever there. A
    death counts for every kind of peak."""
    listed = []
    for index in np.flatnonzero(chosen & ~(scores.share * FUJII_SHARE > 1.0)).tolist():
        run = pool.runs[index]
        share = float(scores.share[index]) if np.isfinite(scores.share[index]) else None
        if run.died:
            listed += [Score(DIED, kind, run.family, run.version, share) for kind in BOUNDING]
        elif scores.kind[index] >= 0:
            kind = BOUNDING[scores.kind[index]]
            listed.append(Score(float(scores.worst[index]), kind, run.family, run.version, share))
    return listed


def scores_of_records(
    records: Iterable[Record], clusters: Mapping[str, Cluster], backend: str, accelerator: str
) -> list[Score]:
    """Return the scores, without any correction, of all runs of a backend (a value of TABLES) on `accelerator`.
    `records` come the newest first."""
    configurations, _ = gather(record for record in records if table_of(record) == backend)
    for pool in pools(configurations, clusters)[0]:
        if pool.accelerator == accelerator:
            return scores_of_runs(pool, score_runs(pool, uniform(pool, NO_CORRECTION)), np.ones(len(pool), np.bool_))
    return []


def errors_of(pool: Pool, scores: RunScores, chosen: NDArray[np.bool_]) -> Errors:
    """Return the errors on the chosen runs that lived, and the bounds that all chosen runs give."""
    lived = chosen & np.isfinite(scores.typical) & ~np.array([run.died for run in pool.runs])
    over = 1.0 / scores.typical[lived] - 1.0
    worst = scores.worst[lived]
    listed, bias = scores_of_runs(pool, scores, chosen), float(np.mean(over))
    return Errors(
        mape=float(np.mean(np.abs(over))),
        bias=bias,
        worst_under=max(float(np.max(worst)) - 1.0, 0.0),
        under_share=float(np.mean(worst > 1.0)),
        bounds=tuple(_bound_with_room(listed, risk, bias) for risk in RISKS),
    )


def _bound_with_room(scores: Sequence[Score], risk: float, bias: float) -> Bound:
    """Return the bound over one kind of peak. What was not measured outside torch lets a bound on `reserved` never be
    below 1."""
    of_kind = scores_of_best_kind(scores, runs_needed(risk))
    bound = bound_at(risk, of_kind)
    if of_kind and of_kind[0].kind != DEVICE:
        bound = replace(bound, ratio=_at_least_one(bound.ratio), near_limit_ratio=_at_least_one(bound.near_limit_ratio))
    worse = bound.worse
    return bound if worse is None else replace(bound, room=(1.0 + bias) * max(worse, 1.0))


def _at_least_one(ratio: float | None) -> float | None:
    return None if ratio is None else max(ratio, 1.0)
