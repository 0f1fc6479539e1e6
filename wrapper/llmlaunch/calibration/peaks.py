"""Peaks of the runs of one pool as something to learn from: scored with a correction, and a correction fitted to
them: measured minus predicted bytes as equations in its two parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from llmlaunch.calibration.calibrations import MEMORY, Calibration, Errors, Quantity
from llmlaunch.calibration.evidence import FUJII_SHARE
from llmlaunch.calibration.learning import Fit, errors_of_scores, folds_of, gains
from llmlaunch.calibration.pool import ALLOCATED, DEVICE, OUTSIDE, RESERVED, Peaks, Pool, PooledRun, gather, pools
from llmlaunch.calibration.ratios import BOUNDING, DEATH, Score
from llmlaunch.calibration.records import Record, table_of
from llmlaunch.cluster.profile import Cluster
from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.memory.job import NO_CORRECTION, Correction
from llmlaunch.units import GIB

TORCH_NOISE, OUTSIDE_NOISE = 0.02, 0.25 * GIB
WIDTHS = np.array([0.1, 1.0 * GIB])  # of the prior, of share and bytes outside
HUBER = 1.345  # 95 % of the efficiency of least squares where noise is normal
LEAST_SCALE = 0.1  # of the expected noise: runs that agree to the byte leave none
ROUNDS = 40
LOWEST_SHARE = -0.5

Parts = tuple[bool, bool]  # whether torch's share and the bytes outside are learned
PARTS: tuple[Parts, ...] = ((False, False), (False, True), (True, False), (True, True))  # the plainest first


@dataclass(frozen=True)
class Equations:
    """torch x s + outside x c = residual, in bytes, one row each. `runs` are indices into the pool; the residual of a
    `censored` row is a lower bound."""

    runs: IntColumn
    torch: FloatColumn
    outside: FloatColumn  # 0 or 1
    residual: FloatColumn
    censored: NDArray[np.bool_]

    def of(self, runs: NDArray[np.bool_]) -> Equations:
        """Return the equations of the runs that are true in `runs`."""
        return self.rows(runs[self.runs])

    def rows(self, chosen: NDArray[np.bool_]) -> Equations:
        return Equations(**{f.name: getattr(self, f.name)[chosen] for f in fields(self)})


def equations_of(pool: Pool) -> Equations:
    """Return up to two equations for each run that lived, and one for each that died."""
    device = _fullest_rows(pool.peaks[DEVICE], {})
    stages = {run: int(pool.peaks[DEVICE].stages[row]) for run, row in device.items()}
    rows_of = {quantity: _fullest_rows(peaks, stages) for quantity, peaks in pool.peaks.items()}
    lived = (row for run in range(len(pool)) for row in _equations_of_run(run, pool, rows_of))
    rows = list(chain(lived, _equations_of_deaths(pool)))
    runs, torch, outside, residual, censored = np.array(rows, dtype=np.float64).reshape(-1, 5).T
    return Equations(runs.astype(np.int64), torch, outside, residual, censored.astype(np.bool_))


def _fullest_rows(peaks: Peaks, stages: Mapping[int, int]) -> dict[int, int]:
    """Map each surviving run to the row of its fullest stage, as `stages` tells. If that stage was not measured, use
    the measured stage with the highest typical peak."""
    best: dict[int, tuple[bool, float, int]] = {}
    for row in np.flatnonzero(~peaks.needed & np.isfinite(peaks.typical)).tolist():
        run = int(peaks.runs[row])
        rank = (peaks.stages[row] == stages.get(run), float(peaks.typical[row]), row)
        best[run] = max(rank, best.get(run, rank))
    return {run: row for run, (_, _, row) in best.items()}


def _equations_of_run(run: int, pool: Pool, rows_of: dict[str, dict[int, int]]) -> Iterator[tuple[float, ...]]:
    device, reserved, allocated, outside = (rows_of[q].get(run) for q in (DEVICE, RESERVED, ALLOCATED, OUTSIDE))
    if reserved is not None:
        peaks = pool.peaks[RESERVED]
        yield (run, peaks.reserved[reserved], 0.0, peaks.typical[reserved] - peaks.reserved[reserved], False)
    elif allocated is not None and device is not None:
        peaks = pool.peaks[ALLOCATED]
        yield (run, peaks.allocated[allocated], 0.0, peaks.typical[allocated] - peaks.allocated[allocated], False)
    if outside is not None:
        peaks = pool.peaks[OUTSIDE]
        yield (run, 0.0, 1.0, peaks.typical[outside] - peaks.outside[outside], False)
    if device is not None and (reserved is None or outside is None):
        peaks = pool.peaks[DEVICE]
        predicted = peaks.reserved[device] + peaks.outside[device]
        yield (run, peaks.reserved[device], 1.0, peaks.typical[device] - predicted, False)


def _equations_of_deaths(pool: Pool) -> Iterator[tuple[float, ...]]:
    """Return for each run that died the need that is furthest above its prediction."""
    equations: dict[int, tuple[float, ...]] = {}
    for quantity, with_outside in ((RESERVED, 0.0), (DEVICE, 1.0)):
        peaks = pool.peaks[quantity]
        for row in np.flatnonzero(peaks.needed).tolist():
            run = int(peaks.runs[row])
            residual = peaks.worst[row] - peaks.reserved[row] - with_outside * peaks.outside[row]
            if run not in equations or residual > equations[run][3]:
                equations[run] = (run, peaks.reserved[row], with_outside, residual, True)
    return iter(equations.values())


def correction_of(equations: Equations, parts: Parts, only_up: bool = False) -> Correction:
    """Return the correction whose `parts` solve the equations; the others stay 0. With `only_up` none is negative."""
    if not any(parts):
        return NO_CORRECTION
    solution = _solve(equations.rows(~equations.censored), parts)
    if np.any(equations.censored):
        solution = np.maximum(_solve(equations, parts), solution)
    if only_up:
        solution = np.maximum(solution, 0.0)
    return Correction(torch_share=max(float(solution[0]), LOWEST_SHARE), outside_bytes=float(solution[1]))


def _solve(equations: Equations, parts: Parts) -> FloatColumn:
    """Return (share, bytes outside)."""
    noise = np.hypot(TORCH_NOISE * equations.torch, OUTSIDE_NOISE * equations.outside)
    noise = np.maximum(noise, 1.0)
    features = np.column_stack([equations.torch, equations.outside]) * (WIDTHS / noise[:, None])
    used = np.array(parts)
    features = features * used
    target, censored = equations.residual / noise, equations.censored
    lived = ~censored
    solution = np.zeros(2)
    for _ in range(ROUNDS):
        fitted = features @ solution
        residual = np.where(lived, target - fitted, 0.0)
        scale = _scale(residual[lived])
        if np.any(censored):
            residual = np.where(lived, residual, _mean_above(target - fitted, residual[lived]))
        weight = HUBER * scale / np.maximum(np.abs(residual), HUBER * scale) / scale**2
        weighted = features * weight[:, None]
        step = np.linalg.solve(weighted.T @ features + np.eye(2), weighted.T @ residual - solution)
        solution = solution + step
        if np.max(np.abs(step)) < 1e-7:
            break
    return np.asarray(solution * WIDTHS * used)


def _scale(residual: FloatColumn) -> float:
    if len(residual) < 3:
        return 1.0
    return max(float(np.median(np.abs(residual))) * 1.4826, LEAST_SCALE)


def _mean_above(bound: FloatColumn, residual: FloatColumn) -> FloatColumn:
    """Return for each bound the mean of the residuals above it, or the bound if there is none; never below 0."""
    ordered = np.sort(residual)[::-1]
    above = np.searchsorted(-ordered, -bound, side="left")  # how many residuals exceed each bound
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    mean = np.where(above > 0, sums[above] / np.maximum(above, 1), bound)
    return np.maximum(mean, 0.0)


FEWEST_RUNS = 10  # that lived, with a known device or reserved peak


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


@dataclass(frozen=True)
class PeakRuns:
    """The runs of a pool that somebody could have planned: those that are true in `chosen`."""

    pool: Pool
    chosen: NDArray[np.bool_]
    quantity: Quantity[Correction] = MEMORY
    fewest: int = FEWEST_RUNS
    needed: str = "runs are needed that succeeded and whose device or reserved peak is known"
    plain_refusal: str | None = None

    @property
    def backend(self) -> str:
        return self.pool.backend

    @property
    def accelerator(self) -> str:
        return self.pool.accelerator

    @property
    def name(self) -> tuple[str, str]:
        return self.backend, self.accelerator

    @cached_property
    def runs(self) -> tuple[PooledRun, ...]:
        return tuple(run for run, counts in zip(self.pool.runs, self.chosen, strict=True) if counts)

    @cached_property
    def died(self) -> NDArray[np.bool_]:
        return np.array([run.died for run in self.pool.runs], dtype=np.bool_)

    @property
    def lived(self) -> int:
        typical = score_runs(self.pool, uniform(self.pool, NO_CORRECTION)).typical
        return int(np.sum(self.chosen & ~self.died & np.isfinite(typical)))

    def errors(self, correction: Correction) -> Errors:
        """Return the errors on the runs that lived, and the bounds that all runs give."""
        return self._errors(score_runs(self.pool, uniform(self.pool, correction)))

    def _errors(self, scores: RunScores) -> Errors:
        lived = self.chosen & np.isfinite(scores.typical) & ~self.died
        listed = scores_of_runs(self.pool, scores, self.chosen)
        return errors_of_scores(scores.typical[lived], scores.worst[lived], listed)

    def fit(self) -> Fit[Correction]:
        """Runs of one model are no ground to promise other models less: then no part may be negative (`only_up`)."""
        equations = equations_of(self.pool).of(self.chosen)
        only_up = len({run.model for run in self.runs}) == 1
        parts = _best_parts(self.pool, equations, self.chosen, only_up)
        scores = score_runs(self.pool, cross_validated(self.pool, equations, parts, only_up))
        listed = tuple(scores_of_runs(self.pool, scores, self.chosen))
        return Fit(correction_of(equations, parts, only_up), self._errors(scores), listed)


def peak_runs(pool: Pool, before: Calibration[Correction] | None = None) -> PeakRuns:
    """Return the runs of a pool that are predicted within their card without any correction or by the one in use, and
    of which it is known what they took. `before` is the calibration in use."""
    in_use = NO_CORRECTION if before is None else before.correction
    plain, corrected = (score_runs(pool, uniform(pool, correction)) for correction in (NO_CORRECTION, in_use))
    died = np.array([run.died for run in pool.runs], dtype=np.bool_)
    within = ~(np.fmin(plain.share, corrected.share) * FUJII_SHARE > 1.0)
    return PeakRuns(pool, within & (died | np.isfinite(plain.worst)))


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
            listed += [Score(DEATH, kind, run.family, run.version, share) for kind in BOUNDING]
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
