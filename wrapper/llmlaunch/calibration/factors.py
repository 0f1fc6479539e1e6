"""Timed runs of one class as something to learn from: the factors of their step times.

A step is not a sum of parts: what is hidden costs less than what is waited for. So each run is linearised: by how many
per cent its predicted step grows if one kind of seconds grows by one per cent. The logarithm of measured / predicted
is then a sum over factors, which is solved by least squares with Huber's weights. A ridge keeps each factor near 1 by
as much as is known without any run (PRIOR), so that runs which say little of a link move it little.

A factor is learned only where it predicts runs better that it has not seen: whole models are left out together, or
configurations where all runs are of one model. What the runs cannot tell apart stays with the factor that explains the
most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llmlaunch.calibration.calibrations import TIME, Errors, Quantity
from llmlaunch.calibration.learning import Fit, errors_of_scores, folds_of, gains
from llmlaunch.calibration.ratios import STEP, Score
from llmlaunch.calibration.records import TimeClass
from llmlaunch.calibration.step_times import TimedRun, predicted_seconds
from llmlaunch.columns import FloatColumn
from llmlaunch.timing.correction import FACTORS, NO_TIME_CORRECTION, TimeCorrection

FEWEST_TIMED_RUNS = 3  # configurations: with fewer none can be left out
# Standard deviations of the logarithm of each factor before any run was measured: constants come from other sites'
# cards and networks. NOISE is that of a run beside its factors: a step time is repeated within 1 or 2 %, and layouts
# of one model are off by a few per cent each.
PRIOR = {"compute": 0.15, "node": 0.25, "domain": 0.25, "fabric": 0.4, "host": 0.4}
NOISE = 0.04
NUDGE = 0.05  # logarithm by which a factor is changed to see what a step does
ROUNDS = 3  # of linearising and solving: what is hidden at one factor may be waited for at another
HUBER = 1.5
LEAST, MOST = 0.2, 5.0  # of a factor: beyond, the runs are of another machine than the profile says
LEAST_SHARE = 0.02  # of its step that a kind of seconds has to make in some run to be learned from
LEAST_GAIN = 0.005  # of a step, on unseen runs: for less no factor is worth the other layout it may lead to

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class TimedRuns:
    """The timed runs of one class of jobs."""

    job: TimeClass
    runs: Sequence[TimedRun]
    quantity: Quantity[TimeCorrection] = TIME
    fewest: int = FEWEST_TIMED_RUNS
    needed: str = "configurations are needed whose step was timed"
    plain_refusal: str | None = "no factor predicts unseen runs better than none does"

    @property
    def backend(self) -> str:
        return self.job.key[0]

    @property
    def accelerator(self) -> str:
        return self.job.key[1]

    @property
    def name(self) -> tuple[str, str]:
        models = "mixture" if self.job.mixture else "dense"
        return f"{TIME.prefix}{self.backend}-{models}", self.job.accelerator

    @property
    def lived(self) -> int:
        return len(self.runs)

    def errors(self, correction: TimeCorrection) -> Errors:
        return self._errors(self._scores([correction] * len(self.runs)))

    def fit(self) -> Fit[TimeCorrection]:
        names = _best_names(self.runs)
        scores = self._scores(_cross_validated(self.runs, names))
        correction = replace(fitted(self.runs, names), runs=len(self.runs))
        return Fit(correction if names else NO_TIME_CORRECTION, self._errors(scores), tuple(scores))

    def _scores(self, corrections: Sequence[TimeCorrection]) -> list[Score]:
        return [
            Score(run.seconds / predicted_seconds(run, correction), STEP, run.family, run.version, None)
            for run, correction in zip(self.runs, corrections, strict=True)
        ]

    def _errors(self, scores: Sequence[Score]) -> Errors:
        ratios = np.array([score.score for score in scores])
        return errors_of_scores(ratios, ratios, scores)


def fitted(runs: Sequence[TimedRun], names: Sequence[str]) -> TimeCorrection:
    """Return the factors of these `names` that explain the runs; the others stay 1. A link inside the node is not told
    apart from one inside its domain where they are the same."""
    correction = NO_TIME_CORRECTION
    for _ in range(ROUNDS if names else 0):
        slopes, residual = _linearised(runs, correction, names)
        # the ridge pulls towards 1, not towards the last round's solution
        known = np.log([correction.factors[name] for name in names])
        logarithms = _solve(slopes, residual + slopes @ known, names)
        factors = np.clip(np.exp(logarithms), LEAST, MOST)
        correction = correction.with_factors(dict(zip(names, map(float, factors), strict=True)))
    return correction


def _linearised(
    runs: Sequence[TimedRun], correction: TimeCorrection, names: Sequence[str]
) -> tuple[Matrix, FloatColumn]:
    """Return for each run what one per cent more of each kind of seconds adds to its predicted step, in per cent, and
    the logarithm of measured / predicted."""
    predicted = np.array([predicted_seconds(run, correction) for run in runs])
    slopes = np.zeros((len(runs), len(names)))
    for place, name in enumerate(names):
        nudged = correction.with_factors({name: correction.factors[name] * float(np.exp(NUDGE))})
        longer = np.array([predicted_seconds(run, nudged) for run in runs])
        slopes[:, place] = np.log(longer / predicted) / NUDGE
    return slopes, np.log(np.array([run.seconds for run in runs]) / predicted)


def _solve(slopes: Matrix, residual: FloatColumn, names: Sequence[str]) -> FloatColumn:
    """Return the logarithms of the factors, by weighted least squares with a ridge (Huber 1964)."""
    ridge = np.diag([PRIOR[name] ** -2.0 for name in names])
    weights = np.ones(len(residual))
    solution = np.zeros(len(names))
    for _ in range(20):
        weighted = slopes * (weights / NOISE**2)[:, None]
        step = np.linalg.solve(weighted.T @ slopes + ridge, weighted.T @ residual)
        off = np.abs(residual - slopes @ step)
        scale = max(float(np.median(off)) * 1.4826, NOISE)
        weights = HUBER * scale / np.maximum(off, HUBER * scale)
        if np.max(np.abs(step - solution)) < 1e-9:
            break
        solution = step
    return np.asarray(solution)


def _best_names(runs: Sequence[TimedRun]) -> tuple[str, ...]:
    """Return the factors to learn: one more at a time, the one that lowers the error on unseen runs most, as long as
    it does by more than chance explains."""
    folds = folds_of([run.model for run in runs])
    models = np.array([run.model for run in runs])
    slopes, residual = _linearised(runs, NO_TIME_CORRECTION, FACTORS)
    offered = [name for place, name in enumerate(FACTORS) if np.max(slopes[:, place]) >= LEAST_SHARE]
    chosen: tuple[str, ...] = ()
    loss = np.abs(residual)
    while True:
        tried = {name: _unseen_loss(slopes, residual, folds, (*chosen, name)) for name in offered if name not in chosen}
        better = {
            name: found
            for name, found in tried.items()
            if float(np.mean(loss - found)) > LEAST_GAIN and gains(loss - found, models)
        }
        if not better:
            return tuple(name for name in FACTORS if name in chosen)
        name = min(better, key=lambda name: float(np.mean(better[name])))
        chosen, loss = (*chosen, name), better[name]


def _unseen_loss(slopes: Matrix, residual: FloatColumn, folds: NDArray[np.int64], names: Sequence[str]) -> FloatColumn:
    """Return how far each run is off, as a logarithm, with the factors learned from the other folds."""
    columns = slopes[:, [FACTORS.index(name) for name in names]]
    loss = np.zeros(len(residual))
    for fold in np.unique(folds):
        inside = folds == fold
        solution = _solve(columns[~inside], residual[~inside], names)
        loss[inside] = np.abs(residual[inside] - columns[inside] @ solution)
    return loss


def _cross_validated(runs: Sequence[TimedRun], names: Sequence[str]) -> list[TimeCorrection]:
    """Return for each run the factors learned from the runs of the other folds."""
    folds = folds_of([run.model for run in runs])
    by_fold = {
        fold: fitted([run for run, other in zip(runs, folds, strict=True) if other != fold], names)
        for fold in np.unique(folds).tolist()
    }
    return [by_fold[fold] for fold in folds.tolist()]
