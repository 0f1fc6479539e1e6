"""What measured runs teach about one recipe's plans, for the planner, which reads no store: what corrects their
predictions, how many runs are behind that, what bound those give, and what ran of the very layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmlaunch.calibration.evidence import EvidenceRun
from llmlaunch.calibration.stops import PUBLISHED_RATE, StopRate
from llmlaunch.layout import Layout
from llmlaunch.memory.job import NO_CORRECTION, Correction
from llmlaunch.recipe.types import NO_CALIBRATION, Recipe
from llmlaunch.techniques import Techniques
from llmlaunch.timing.correction import NO_TIME_CORRECTION, TimeCorrection
from llmlaunch.workload import Workload


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


def no_support(reason: str) -> Support:
    """Return the support of a plan without comparable runs: on a new accelerator, or if no calibration is in use."""
    return Support(0, reason, of_family=0, of_version=0, widened=reason)


def unmeasured_support(recipe: Recipe) -> Support:
    """Return the support of a plan of whose backend no run was measured here, or whose recipe takes no calibration."""
    if recipe.memory.calibration == NO_CALIBRATION:
        return no_support("the recipe takes no calibration")
    where = f"{recipe.backend.framework} on {recipe.cluster.accelerator.name}"
    return no_support(f"no measured run of {where} yet. After your first run: llmlaunch collect")
