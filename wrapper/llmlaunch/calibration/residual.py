"""Measured minus predicted peaks as equations in the two parts of a correction, and their solution.

A prediction has two parts: what torch reserves, R, and what is outside it, O. The correction is s and c in
R (1 + s) + O + c. A run gives up to two equations:

    torch     reserved peak - R = s R          with noise of TORCH_NOISE R
    outside   measured outside - O = c         with noise of OUTSIDE_NOISE
    device    device peak - R - O = s R + c    with both; only where the two parts were not measured apart

Where a device peak comes with an allocated peak A' instead of a reserved one, A' - A = s A stands beside it: it says
nothing of the cache. Each equation is divided by its noise, so that all are in one unit, and solved by

- Huber's M-estimator (1964; tuning constant 1.345), by iteratively reweighted least squares with the scale from the
  median absolute residual: a few runs that were measured wrong move it little;
- a ridge towards no correction, which is a normal prior of the widths below: it decides where the runs do not, as
  between s and c when all runs have the same R;
- for runs that died, whose peak is only known to be above a bound, the mean of what the other residuals say beyond the
  bound (Buckley and James 1979), again at each iteration, and never less than what is predicted: a death can raise a
  correction and never lower it, which the last step makes sure of part by part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from llmlaunch.calibration.pool import ALLOCATED, DEVICE, OUTSIDE, RESERVED, Peaks, Pool
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
