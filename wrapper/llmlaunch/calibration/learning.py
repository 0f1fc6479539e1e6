"""A new calibration from the measured runs of one class, of their peaks or of their step times, or why there is none.
Pure: no store, no clock.

Errors are of predictions with a correction that never saw the run's model: runs are left out by model, all
configurations of it at once, because what is to be predicted next is a layout or a model that has not run. If all runs
are of one model they are left out by configuration, which tells nothing of other models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Generic, Protocol

import numpy as np
from numpy.typing import NDArray

from llmlaunch.calibration.calibrations import (
    Calibration,
    Errors,
    Learned,
    Quantity,
    TrainingData,
    calibration_id,
)
from llmlaunch.calibration.evidence import runs_needed
from llmlaunch.calibration.ratios import BOUNDING, RISKS, STEP, Bound, Score, bound_at, scores_of_best_kind
from llmlaunch.columns import FloatColumn, IntColumn

KINDS = (*BOUNDING, STEP)
WHOLE = (BOUNDING[0], STEP)  # kinds of which nothing was left unmeasured
MOST_FOLDS = 10
# Differences of the mean error, and of what a plan sets aside, that do not count. What is in use was learned from some
# of the same runs and is not cross-validated on them; by about as much it looks better than it is.
ERROR_TOLERANCE, ROOM_TOLERANCE = 0.002, 0.005
SURE = 1.645  # standard errors: a gain that chance gives once in twenty


class MeasuredRun(Protocol):
    """One configuration that ran. `model` is equal for runs of one model, however they are split; `lines` has one line
    for each record, equal for equal data."""

    @property
    def model(self) -> str: ...
    @property
    def family(self) -> str: ...
    @property
    def version(self) -> str | None: ...
    @property
    def lines(self) -> tuple[str, ...]: ...
    @property
    def died(self) -> bool: ...


@dataclass(frozen=True)
class Fit(Generic[Learned]):
    """What runs teach: the correction, and the errors and scores of predictions by corrections that had not seen
    them."""

    correction: Learned
    errors: Errors
    scores: tuple[Score, ...]


class MeasuredRuns(Protocol[Learned]):
    """The runs of one class that something is learned from. `lived` are those with a measured quantity, of which
    `fewest` are `needed`, in words. `name` is what ids begin with. `plain_refusal` is why a correction that changes
    nothing is not taken, None if it is, for its scores."""

    @property
    def quantity(self) -> Quantity[Learned]: ...
    @property
    def backend(self) -> str: ...
    @property
    def accelerator(self) -> str: ...
    @property
    def name(self) -> tuple[str, str]: ...
    @property
    def runs(self) -> Sequence[MeasuredRun]: ...
    @property
    def lived(self) -> int: ...
    @property
    def fewest(self) -> int: ...
    @property
    def needed(self) -> str: ...
    @property
    def plain_refusal(self) -> str | None: ...
    def errors(self, correction: Learned) -> Errors: ...
    def fit(self) -> Fit[Learned]: ...


@dataclass(frozen=True)
class LearningResult:
    """What came of a class of runs. `calibration` is None if there were too few. `refusal` is a sentence without a full
    stop if the calibration must not be used, None if it may."""

    quantity: Quantity[Any]
    backend: str
    accelerator: str
    device: str  # the name of the accelerator alone
    runs: int
    died: int
    calibration: Calibration[Any] | None
    refusal: str | None


def learn(
    measured: MeasuredRuns[Learned], before: Calibration[Learned] | None, made_at: float, llmlaunch: str, estimator: str
) -> LearningResult:
    """Learn from the runs of a class. `before` is the calibration in use; `llmlaunch` and `estimator` name the program
    that learns."""
    quantity, runs = measured.quantity, measured.runs
    died = sum(run.died for run in runs)
    result = LearningResult(
        quantity, measured.backend, measured.accelerator, measured.name[1], len(runs), died, None, None
    )
    if measured.lived < measured.fewest:
        deaths = f", and {died} more ran out of memory" if died else ""
        few = f"{measured.fewest} {measured.needed}; the store holds {measured.lived}{deaths}"
        return replace(result, refusal=few)
    counts = before is not None and (quantity.outdated_counts or before.estimator == estimator)
    in_use = before.correction if before is not None and counts else quantity.none
    fit, new_id = measured.fit(), calibration_id(*measured.name, made_at)
    calibration = Calibration(
        quantity=quantity,
        id=new_id,
        backend=measured.backend,
        accelerator=measured.accelerator,
        made_at=made_at,
        llmlaunch=llmlaunch,
        estimator=estimator,
        data=_training_data(runs),
        correction=replace(fit.correction, calibration_id=new_id),
        before=measured.errors(in_use),
        after=fit.errors,
        scores=fit.scores,
    )
    refusal = measured.plain_refusal if fit.correction == quantity.none else None
    return replace(result, calibration=calibration, refusal=refusal or _regression(calibration.before, fit.errors))


def _training_data(runs: Sequence[MeasuredRun]) -> TrainingData:
    lines = sorted(line for run in runs for line in run.lines)
    return TrainingData(
        runs=len(runs),
        records=len(lines),
        died=sum(run.died for run in runs),
        digest=sha256("\n".join(lines).encode()).hexdigest(),
        families=dict(sorted(Counter(run.family for run in runs).items())),
        versions=dict(sorted(Counter(run.version or "unknown" for run in runs).items())),
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


def gains(gain: FloatColumn, models: NDArray[np.str_]) -> bool:
    """Whether the mean is SURE standard errors above zero. They are taken over models: two runs of one model are not
    two witnesses."""
    groups = np.unique(models, return_inverse=True)[1]
    if groups.max(initial=0) == 0:
        groups = np.arange(len(gain))
    sums = np.bincount(groups, weights=gain - np.mean(gain))
    error = float(np.sqrt(np.sum(sums**2) * len(sums) / (len(sums) - 1))) / len(gain)
    return float(np.mean(gain)) > max(SURE * error, 1e-6)


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


def errors_of_scores(typical: FloatColumn, worst: FloatColumn, scores: Sequence[Score]) -> Errors:
    """Return the errors of runs that lived, by measured / predicted of their repeats: the median and the highest; and
    the bounds that the scores of all runs give."""
    over = 1.0 / typical - 1.0
    bias = float(np.mean(over))
    return Errors(
        mape=float(np.mean(np.abs(over))),
        bias=bias,
        worst_under=max(float(np.max(worst)) - 1.0, 0.0),
        under_share=float(np.mean(worst > 1.0)),
        bounds=tuple(_bound_with_room(scores, risk, bias) for risk in RISKS),
    )


def _bound_with_room(scores: Sequence[Score], risk: float, bias: float) -> Bound:
    """Return the bound over one kind of peak. What was not measured outside torch lets a bound on `reserved` never be
    below 1."""
    of_kind = scores_of_best_kind(scores, runs_needed(risk), KINDS)
    bound = bound_at(risk, of_kind)
    if of_kind and of_kind[0].kind not in WHOLE:
        bound = replace(bound, ratio=_at_least_one(bound.ratio), near_limit_ratio=_at_least_one(bound.near_limit_ratio))
    worse = bound.worse
    return bound if worse is None else replace(bound, room=(1.0 + bias) * max(worse, 1.0))


def _at_least_one(ratio: float | None) -> float | None:
    return None if ratio is None else max(ratio, 1.0)
