"""How far predictions with a correction are off: each run by a correction that never saw its model.

Runs are left out by model, all configurations of it at once: what is to be predicted next is a layout or a model that
has not run. Where all runs are of one model they are left out by configuration, which says nothing of other models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llmlaunch.calibration.accuracy import RULE
from llmlaunch.calibration.bounds import bound_at
from llmlaunch.calibration.calibrations import Bound, Errors, Score
from llmlaunch.calibration.coverage import RISKS
from llmlaunch.calibration.evidence import DEVICE
from llmlaunch.calibration.margins import DIED, runs_needed
from llmlaunch.calibration.pool import Peaks, Pool
from llmlaunch.calibration.residual import Equations, Parts, correction_of
from llmlaunch.calibration.support import BOUNDING
from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.memory.correction import Correction

__all__ = ["Corrected", "Scored", "corrected", "cross_validated", "errors_of", "folds_of", "scored", "scores_of"]

MOST_FOLDS = 10


@dataclass(frozen=True)
class Corrected:
    """The correction by which each run of a pool is predicted, one number a run."""

    torch_share: FloatColumn
    outside_bytes: FloatColumn


@dataclass(frozen=True)
class Scored:
    """One number a run: measured / predicted of its device peak, or of its reserved peak with the predicted bytes
    outside (`kind` is the place in BOUNDING), by the highest of its repeats and by their median; NaN where neither
    peak is known. `short` is by how much, as a logarithm, the prediction is below what a run that died needed at least.
    """

    kind: IntColumn
    worst: FloatColumn
    typical: FloatColumn
    short: FloatColumn
    share: FloatColumn  # predicted, of the rule's limit; NaN where no card is known


def corrected(pool: Pool, correction: Correction) -> Corrected:
    """The same for all runs."""
    return Corrected(np.full(len(pool), correction.torch_share), np.full(len(pool), correction.outside_bytes))


def folds_of(models: Sequence[str]) -> IntColumn:
    """The fold of each run: whole models, spread evenly over at most MOST_FOLDS, the largest first."""
    if len(set(models)) == 1:
        return np.arange(len(models)) % MOST_FOLDS
    names, counts = np.unique(np.array(models), return_counts=True)
    filled = np.zeros(min(MOST_FOLDS, len(names)), dtype=np.int64)
    fold = {}
    for place in np.argsort(-counts, kind="stable"):
        fold[str(names[place])] = emptiest = int(np.argmin(filled))
        filled[emptiest] += counts[place]
    return np.array([fold[model] for model in models])


def cross_validated(pool: Pool, equations: Equations, parts: Parts, only_up: bool) -> Corrected:
    """Each run's correction from the runs of the other folds."""
    folds = folds_of([run.model for run in pool.runs])
    share, outside = np.zeros(len(pool)), np.zeros(len(pool))
    for fold in np.unique(folds):
        mine = folds == fold
        found = correction_of(equations.of(~mine), parts, only_up)
        share[mine], outside[mine] = found.torch_share, found.outside_bytes
    return Corrected(share, outside)


def scored(pool: Pool, by: Corrected) -> Scored:
    kind = np.full(len(pool), -1)
    worst, typical = np.full(len(pool), np.nan), np.full(len(pool), np.nan)
    short = np.zeros(len(pool))
    for place, quantity in reversed(list(enumerate(BOUNDING))):  # device last: it is preferred
        peaks = pool.peaks[quantity]
        torch, outside = _predicted(peaks.reserved, peaks.outside, peaks.runs, by)
        beside = np.zeros(len(torch)) if quantity == DEVICE else outside  # was not measured
        found = _highest(peaks, torch + outside, peaks.worst + beside, len(pool))
        kind[~np.isnan(found)] = place
        worst = np.where(np.isnan(found), worst, found)
        found = _highest(peaks, torch + outside, peaks.typical + beside, len(pool))
        typical = np.where(np.isnan(found), typical, found)
        needed = peaks.needed
        lacking = np.log(np.maximum(peaks.worst, 1.0) / np.maximum(torch + (quantity == DEVICE) * outside, 1.0))
        np.maximum.at(short, peaks.runs[needed], lacking[needed])
    return Scored(kind, worst, typical, short, _shares(pool, by))


def _predicted(
    reserved: FloatColumn, outside: FloatColumn, runs: IntColumn, by: Corrected
) -> tuple[FloatColumn, FloatColumn]:
    """Torch's bytes and those outside (`memory.correction`)."""
    return reserved * (1.0 + by.torch_share[runs]), np.maximum(outside + by.outside_bytes[runs], 0.0)


def _highest(peaks: Peaks, predicted: FloatColumn, measured: FloatColumn, runs: int) -> FloatColumn:
    """By run the highest measured of its stages over the highest predicted of the same; NaN where it has none."""
    known = ~peaks.needed & np.isfinite(measured)
    top, said = np.full(runs, -np.inf), np.full(runs, 1.0)
    np.maximum.at(top, peaks.runs[known], measured[known])
    np.maximum.at(said, peaks.runs[known], predicted[known])
    return np.where(np.isfinite(top), top / said, np.nan)


def _shares(pool: Pool, by: Corrected) -> FloatColumn:
    sizes = np.diff([*pool.starts, len(pool.reserved)])
    torch, outside = _predicted(pool.reserved, pool.outside, np.repeat(np.arange(len(pool)), sizes), by)
    cards = np.array([run.card_bytes or np.nan for run in pool.runs], dtype=np.float64)
    return np.asarray(np.maximum.reduceat(torch + outside, pool.starts) / (RULE * cards))


def scores_of(pool: Pool, found: Scored, chosen: NDArray[np.bool_]) -> list[Score]:
    """Of the chosen runs that are not predicted above their card: no plan is ever there. A death speaks for every kind
    of peak."""
    listed = []
    for run in np.flatnonzero(chosen & ~(found.share * RULE > 1.0)).tolist():
        about, share = pool.runs[run], float(found.share[run])
        known = share if np.isfinite(share) else None
        if about.died:
            listed += [Score(DIED, kind, about.family, about.version, known) for kind in BOUNDING]
        elif found.kind[run] >= 0:
            kind = BOUNDING[found.kind[run]]
            listed.append(Score(float(found.worst[run]), kind, about.family, about.version, known))
    return listed


def errors_of(pool: Pool, found: Scored, chosen: NDArray[np.bool_]) -> Errors:
    """Of the chosen runs that lived."""
    lived = chosen & np.isfinite(found.typical) & ~np.array([run.died for run in pool.runs])
    over = 1.0 / found.typical[lived] - 1.0
    worst = found.worst[lived]
    scores = scores_of(pool, found, chosen)
    return Errors(
        mape=float(np.mean(np.abs(over))),
        bias=float(np.mean(over)),
        worst_under=max(float(np.max(worst)) - 1.0, 0.0),
        under_share=float(np.mean(worst > 1.0)),
        bounds=tuple(_with_room(_bound(scores, risk), 1.0 + float(np.mean(over))) for risk in RISKS),
    )


def _bound(scores: Sequence[Score], risk: float) -> Bound:
    """Over one kind of peak: `device` where it has enough runs, else the kind with most. What was not measured outside
    torch lets a bound on `reserved` never be below 1."""
    by_kind = {kind: [(one.score, one.share) for one in scores if one.kind == kind] for kind in BOUNDING}
    enough = (kind for kind in BOUNDING if len(by_kind[kind]) >= runs_needed(risk))
    kind = next(enough, max(BOUNDING, key=lambda one: len(by_kind[one])))
    bound = bound_at(risk, by_kind[kind])
    if kind == DEVICE:
        return bound
    return replace(bound, ratio=_at_least_one(bound.ratio), near_limit_ratio=_at_least_one(bound.near_limit_ratio))


def _at_least_one(ratio: float | None) -> float | None:
    return None if ratio is None else max(ratio, 1.0)


def _with_room(bound: Bound, over: float) -> Bound:
    worse = bound.worse
    return bound if worse is None else replace(bound, room=over * max(worse, 1.0))
