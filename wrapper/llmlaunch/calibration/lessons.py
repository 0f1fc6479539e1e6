"""What measured runs teach about one recipe's plans, for the planner, which reads no store: what corrects their
predictions, how many runs are behind that, what bound those give, and what ran of the very layouts.

Comparable are runs of the same backend family on the same accelerator; of them those of the same framework major.minor
where both are known, as long as these suffice. A family of models, or a framework version, of which there are no or too
few runs is *new*: the measured runs are then no sample of what is planned. Each known family (or version) stands for
one that was once new, so the bound is the worst of theirs, each taken alone. If only one is known, nothing tells how
far another may lie, and there is no bound. Such a bound never allows more than the rule does, and nothing is subtracted
from a prediction for runs of another kind.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmlaunch.calibration.evidence import (
    BOUNDING,
    DEATH,
    Bound,
    EvidenceRun,
    Score,
    bound_at,
    no_bound_sentence,
    runs_needed,
    scores_of_best_kind,
    upper_ratio,
)
from llmlaunch.calibration.stops import PUBLISHED_RATE, StopRate
from llmlaunch.frameworks.framework_version import minor
from llmlaunch.layout import Layout
from llmlaunch.memory.job import NO_CORRECTION, Correction
from llmlaunch.rundir.values import counted
from llmlaunch.techniques import Techniques
from llmlaunch.timing.correction import NO_TIME_CORRECTION, TimeCorrection
from llmlaunch.workload import Workload

RESIDENT = ("resident",)  # the kind of peak on a CPU-only machine


@dataclass(frozen=True)
class RunClass:
    """The class of runs that a plan belongs to. `family` is a value of `models.shape.kind_of`, `version` the
    framework's, `kinds` the kinds of peak a margin may rest on, best first."""

    accelerator: str
    family: str
    version: str | None
    kinds: tuple[str, ...] = BOUNDING


@dataclass(frozen=True)
class Support:
    """The measured runs behind a plan: all comparable ones, those of its family of models, and those of its framework
    major.minor (unknown versions count, as they do for the bound); None if nobody counted. `highest` is the largest
    measured / predicted of those that lived. `widened` tells in what way the plan is new to them."""

    runs: int
    sentence: str
    of_family: int | None = None
    of_version: int | None = None
    died: int = 0
    highest: float | None = None
    calibration_id: str | None = None
    widened: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return `memory.evidence` of a plan."""
        return {
            "runs": self.runs,
            "of_family": self.of_family,
            "of_version": self.of_version,
            "calibration": self.calibration_id,
            "widened": self.widened,
        }


@dataclass(frozen=True)
class RatioBound:
    """The ratio measured / predicted that a peak exceeds at most at the risk asked for, by `runs` comparable ones; None
    if they do not suffice. `sentence` says what the bound rests on, or why there is none, without a full stop.
    `widened` says in what way the plan is new to the runs, if it is: such a bound may not allow more than the rule."""

    runs: int
    ratio: float | None
    sentence: str
    widened: str | None = None


@dataclass(frozen=True)
class Rehearsal:
    """What ranks that ran alone, or a whole run of the same job, tell of one layout with its techniques.

    `safe`, `tight` and `device_bytes` are those of the rank nearest to its limit or farthest beyond it, on a device
    that may be filled to `limit_bytes`; the estimate of that rank is `short_bytes` too low, or more where it `ran_out`
    of memory. `sentence` is for a person, `details` is `memory.rehearsed` of a plan's JSON."""

    workload: Workload
    layout: Layout
    techniques: Techniques
    gradient_dtype: str | None
    safe: bool
    device_bytes: int
    limit_bytes: int
    short_bytes: int
    sentence: str
    details: Mapping[str, Any]
    tight: bool = False
    ran_out: bool = False

    def allows(self, limit_bytes: int) -> bool:
        """Whether the layout passes on a device that may be filled to `limit_bytes`, whatever its estimate. A safe one
        does not where less may be filled than when it was judged, as for a fallback layout; there the estimate
        decides."""
        return limit_bytes >= self.limit_bytes if self.safe else self.tight and limit_bytes >= self.device_bytes

    def refuses(self, limit_bytes: int) -> bool:
        """Whether the layout is refused on such a device, whatever its estimate."""
        return not self.safe and not self.allows(limit_bytes)


FEWEST_AGREEING = 2  # runs


@dataclass(frozen=True)
class MeasuredStep:
    """The step time of one layout with its techniques, as runs of the very job took: the median of `runs`, the newest
    of which is `run_id`. `agreeing` of them took as long but for what a step time is repeated within."""

    workload: Workload
    layout: Layout
    techniques: Techniques
    gradient_dtype: str | None
    step_seconds: float
    runs: int
    run_id: str
    agreeing: int = 1

    @property
    def decides(self) -> bool:
        """Whether it takes the place of the predicted step time where layouts are compared: a single run may be that of
        a slow node, and corrects all layouts alike."""
        return self.agreeing >= FEWEST_AGREEING


@dataclass(frozen=True)
class TimeEvidence:
    """What measured runs say of the chosen layout's step time. `uncorrected_seconds` are predicted without any run,
    `predicted_seconds` with `correction`. Where `measured` decides, its step time takes the place of both; what single
    runs show multiplies the step times of all layouts by `shared_factor`."""

    uncorrected_seconds: float
    predicted_seconds: float
    correction: TimeCorrection = NO_TIME_CORRECTION
    measured: MeasuredStep | None = None
    shared_factor: float = 1.0

    def as_json(self) -> dict[str, Any]:
        """Return the value of `step_evidence` of a plan's JSON."""
        correction, measured = self.correction, self.measured
        about = {name: getattr(correction, name) for name in ("runs", "calibration_id")}
        job_factor = correction.job_factor * self.shared_factor
        unchanged = correction.changes_nothing and job_factor == 1.0
        return {
            "uncorrected_seconds": self.uncorrected_seconds,
            "predicted_seconds": self.predicted_seconds,
            "correction": None if unchanged else {**correction.factors, "job_factor": job_factor, **about},
            "measured": None
            if measured is None
            else {name: getattr(measured, name) for name in ("step_seconds", "runs", "agreeing", "run_id")},
        }


NO_TIME_EVIDENCE = TimeEvidence(0.0, 0.0)


@dataclass(frozen=True)
class Lessons:
    """What measured runs tell of the plans of one recipe. `bound` is that of the store's runs at the recipe's risk,
    None if it names none; `correction` belongs into every prediction; `support` counts the runs behind both, None if
    nobody looked; `own_runs` of the store join the shipped ones where they are too few for a bound of their own;
    `rehearsals` hold for their very shapes only; `stops` is how often runs are stopped unplanned. `time` belongs into
    every step time, and those of the `measured_steps` that decide take its place for their very layouts;
    `shared_factor` is what the others show of all layouts of the job. `time_error` is the mean error of step times so
    corrected on runs that the factors had not seen; None without a calibration."""

    bound: RatioBound | None = None
    correction: Correction = NO_CORRECTION
    support: Support | None = None
    own_runs: tuple[EvidenceRun, ...] = ()
    rehearsals: tuple[Rehearsal, ...] = ()
    stops: StopRate = PUBLISHED_RATE
    time: TimeCorrection = NO_TIME_CORRECTION
    measured_steps: tuple[MeasuredStep, ...] = ()
    shared_factor: float = 1.0
    time_error: float | None = None


NO_LESSONS = Lessons()


def support_of(
    scores: Sequence[Score], target: RunClass, calibration_id: str | None = None, risk: float | None = None
) -> Support:
    """Return the support for plans of the class `target` among the scores that a margin at `risk` would rest on."""
    comparable = scores_of_best_kind(scores, 1 if risk is None else runs_needed(risk), target.kinds)
    if not comparable:
        return replace(no_support(target), calibration_id=calibration_id)
    lived = [score.score for score in comparable if score.score != DEATH]
    family = sum(score.family == target.family for score in comparable)
    version = sum(same_minor(score.version, target.version) for score in comparable)
    support = Support(
        runs=len(comparable),
        sentence="",
        of_family=family,
        of_version=version,
        died=len(comparable) - len(lived),
        highest=max(lived, default=None),
        calibration_id=calibration_id,
        widened=_novelty(family, version, target),
    )
    return replace(support, sentence=_sentence(support, target))


def no_support(target: RunClass, reason: str = "") -> Support:
    """Return the support of a plan without comparable runs: on a new accelerator, or if no calibration is in use."""
    novelty = reason or f"no comparable run on {target.accelerator} was measured"
    return Support(0, novelty, of_family=0, of_version=0, widened=novelty)


def _novelty(family: int, version: int, target: RunClass) -> str | None:
    new = [] if family else [f"no run is of a {target.family} model"]
    new += [] if version else [f"no run is of {_version_text(target.version)}"]
    return f"{' and '.join(new)}: nothing is taken off the prediction for the others" if new else None


def _sentence(support: Support, target: RunClass) -> str:
    version = "" if minor(target.version) is None else f", {support.of_version} of {_version_text(target.version)}"
    family = f"{support.of_family} of this family of models ({target.family})"
    runs = f"{counted(support.runs, 'run')} on {target.accelerator}, {family}{version}"
    dead = [f"{support.died} ran out of memory"] if support.died else []
    above = None if support.highest is None else max(support.highest - 1.0, 0.0)
    high = [] if above is None else [f"none peaked more than {100 * above:.1f} % above its prediction"]
    source = "" if support.calibration_id is None else f" (calibration {support.calibration_id})"
    return f"{runs}: {', '.join(dead + high)}{source}"


def mark_outdated(support: Support) -> Support:
    """Return the support by a calibration that was made for an earlier version of the formula."""
    reason = "the formula has changed since: nothing is taken off the prediction for them"
    return replace(support, widened=reason if support.widened is None else f"{support.widened}; {reason}")


def trusted_correction(correction: Correction, support: Support) -> Correction:
    """Return the part of a correction that holds for the plan: of runs of another kind only what adds to a
    prediction."""
    if support.widened is None:
        return correction
    return replace(
        correction,
        torch_share=max(correction.torch_share, 0.0),
        outside_bytes=max(correction.outside_bytes, 0.0),
    )


def ratio_bound(
    scores: Sequence[Score], target: RunClass, risk: float, calibration_id: str | None = None
) -> RatioBound:
    """Return the bound at `risk` for plans of the class `target`: the larger of the bounds over all comparable runs and
    over those predicted near the limit, where planners choose; widened if the plan is new to them."""
    needed = runs_needed(risk)
    comparable = scores_of_best_kind(scores, needed, target.kinds)
    same_version = [score for score in comparable if same_minor(score.version, target.version)]
    runs = same_version if len(same_version) >= needed else comparable
    bound = bound_at(risk, runs)
    if bound.worse is None:
        holder = "the store" if calibration_id is None else f"calibration {calibration_id}"
        died = sum(score.score == DEATH for score in runs)
        return RatioBound(len(runs), None, no_bound_sentence(risk, len(runs), died, holder))
    kind = runs[0].kind
    sentence = f"risk {risk:g} by {len(runs)} comparable runs on {target.accelerator}"
    sentence += "" if calibration_id is None else f" (calibration {calibration_id})"
    wider = _wider_bound(runs, target, risk)
    if wider is not None and wider.ratio is None:
        return RatioBound(len(runs), None, f"{sentence}: {wider.sentence}", wider.sentence)
    ratio = max(bound.worse, 0.0 if wider is None else wider.ratio or 0.0, 1.0 if kind == "reserved" else 0.0)
    sentence += f": a {kind} peak is at most {ratio:.3f} times the prediction{_deciding_runs(bound)}"
    if wider is None:
        return RatioBound(len(runs), ratio, sentence)
    return RatioBound(len(runs), ratio, f"{sentence}; {wider.sentence}", wider.sentence)


def _deciding_runs(bound: Bound) -> str:
    decided_by_all = bound.ratio is None or bound.worse is None or bound.worse <= bound.ratio
    return "" if decided_by_all else f" by the {bound.near_limit_runs} of them that were near the limit"


@dataclass(frozen=True)
class _WiderBound:
    sentence: str
    ratio: float | None  # None: nothing tells how far what is new may lie


def _wider_bound(runs: Sequence[Score], target: RunClass, risk: float) -> _WiderBound | None:
    """Return the bound if the plan is new to the runs, None if it is not."""
    groupings: list[dict[Hashable, list[float]]] = []
    new: list[str] = []
    if all(score.family != target.family for score in runs):
        groupings.append(_grouped((score.family, score.score) for score in runs))
        new.append(f"no run is of a {target.family} model")
    same = sum(same_minor(score.version, target.version) for score in runs)
    if same < len(runs):  # those of its version alone did not suffice
        groupings.append(_grouped((minor(score.version), score.score) for score in runs))
        new.append(f"{same} are of {_version_text(target.version)}")
    if not new:
        return None
    novelty = " and ".join(new)
    if any(len(groups) < 2 for groups in groupings):
        return _WiderBound(f"{novelty}, and one other kind does not say how far kinds differ", None)
    worst = max(_worst_ratio(scores, risk) for groups in groupings for scores in groups.values())
    if not math.isfinite(worst):
        return _WiderBound(f"{novelty}, and of another kind too many ran out of memory", None)
    return _WiderBound(f"{novelty}: as far off as the worst of the other kinds, and never beyond the rule", worst)


def _grouped(scores: Iterable[tuple[Hashable, float]]) -> dict[Hashable, list[float]]:
    groups: dict[Hashable, list[float]] = {}
    for group, score in scores:
        groups.setdefault(group, []).append(score)
    return groups


def _worst_ratio(scores: Sequence[float], risk: float) -> float:
    """Return the bound of one group alone, or its highest score if it has too few runs for a bound."""
    bound = upper_ratio(scores, risk)
    return max(scores) if bound is None else bound


def same_minor(version: str | None, other: str | None) -> bool:
    """Whether two framework versions agree in major.minor, or one of them is not known."""
    first, second = minor(version), minor(other)
    return first is None or second is None or first == second


def _version_text(version: str | None) -> str:
    number = minor(version)
    return f"version {version}" if number is None else f"version {number[0]}.{number[1]}"
