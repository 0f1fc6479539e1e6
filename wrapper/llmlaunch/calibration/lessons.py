"""What measured runs teach about the plans of one recipe: corrections to predictions, the runs behind them, the bound
that these runs give, and results for particular layouts. The planner uses this and reads no store."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmlaunch.calibration.evidence import EvidenceRun
from llmlaunch.columns import FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.layout import Layout
from llmlaunch.memory.job import NO_CORRECTION, Correction
from llmlaunch.recipe.types import NO_CALIBRATION, Recipe
from llmlaunch.rundir.values import counted
from llmlaunch.techniques import Techniques
from llmlaunch.timing.correction import NO_TIME_CORRECTION, TimeCorrection
from llmlaunch.workload import Workload

# Llama 3: 419 unplanned interruptions in 54 days on 16,384 GPUs (Dubey et al. 2024, arXiv 2407.21783, section 3.3.4).
PUBLISHED_STOPS, PUBLISHED_DEVICE_HOURS = 419, 54 * 24 * 16_384
# The weight of the published rate, in stops. With 2, nine sites of ten lie between 0.18 and 2.4 times its rate. Meta's
# own two research clusters had 6.5 and 2.34 failures in 1,000 node-days of eight GPUs (Kokolis et al. 2024, arXiv
# 2410.21680), which is 1.7 and 0.6 times.
PUBLISHED_WEIGHT = 2.0
# The normal distribution's quantiles at 1/18, 3/18 ... 17/18. The standard library's NormalDist takes 10 ms to import.
NORMAL_LEVELS = np.array([-1.593219, -0.967422, -0.589456, -0.282216, 0.0, 0.282216, 0.589456, 0.967422, 1.593219])
TELLING_SHARE = 0.05  # of the published weight: runs of fewer hours are not worth a word


@frozen
class StopRate:
    """The rate of unplanned stops, as far as it is known: `stops` in `device_hours` of the store's own runs."""

    stops: int = 0
    device_hours: float = 0.0

    @property
    def _shape(self) -> float:
        return PUBLISHED_WEIGHT + self.stops

    @property
    def per_device_hour(self) -> float:
        """The mean of the rate."""
        published_hours = PUBLISHED_WEIGHT * PUBLISHED_DEVICE_HOURS / PUBLISHED_STOPS
        return self._shape / (published_hours + self.device_hours)

    @property
    def equally_likely(self) -> FloatColumn:
        """Nine equally likely rates per device-hour, ascending, with the mean of the distribution.

        By Wilson and Hilferty's approximation of the gamma distribution (1931), which is within 1 % from shape 2 on.
        """
        spread = 1.0 / (9.0 * self._shape)
        relative = (1.0 - spread + NORMAL_LEVELS * math.sqrt(spread)) ** 3
        scaled: FloatColumn = self.per_device_hour * relative / relative.mean()
        return scaled

    @property
    def source(self) -> str:
        """Where the rate comes from, for a person."""
        if self.device_hours < TELLING_SHARE * PUBLISHED_WEIGHT * PUBLISHED_DEVICE_HOURS / PUBLISHED_STOPS:
            return "Llama 3's rate"
        return f"Llama 3's rate and {counted(self.stops, 'stop')} in {self.device_hours:,.0f} GPU-hours of your own"


PUBLISHED_RATE = StopRate()  # of a store without runs


@dataclass(frozen=True)
class Support:
    """The measured runs behind a plan: all comparable ones, those of its model family, and those of its framework's
    major.minor version. Runs of unknown version count, as they do for the bound. A number is None if nobody counted.
    `highest` is the largest measured / predicted among the runs that fitted. `widened` says in what way the plan is new
    to the runs."""

    runs: int
    sentence: str
    of_family: int | None = None
    of_version: int | None = None
    died: int = 0
    highest: float | None = None
    calibration_id: str | None = None
    widened: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the value of `memory.evidence` in a plan's JSON."""
        return {
            "runs": self.runs,
            "of_family": self.of_family,
            "of_version": self.of_version,
            "calibration": self.calibration_id,
            "widened": self.widened,
        }


@dataclass(frozen=True)
class RatioBound:
    """The ratio measured / predicted that a peak exceeds with at most the requested risk, by `runs` comparable runs;
    None if they are not enough. `sentence` says what the bound is based on, or why there is none, without a full stop.
    `widened` says in what way the plan is new to the runs, if it is. Such a bound may not allow more than the rule."""

    runs: int
    ratio: float | None
    sentence: str
    widened: str | None = None


@dataclass(frozen=True)
class Rehearsal:
    """What ranks that ran alone, or a whole run of the same job, showed about one layout with its techniques.

    `safe`, `tight` and `device_bytes` describe the rank that comes nearest to its limit or exceeds it most, on a device
    that may be filled up to `limit_bytes`. The estimate of that rank is `short_bytes` too low, or more if it `ran_out`
    of memory. `sentence` is for the user; `details` is `memory.rehearsed` in a plan's JSON.
    """

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
        """Whether the layout passes on a device that may be filled up to `limit_bytes`, whatever its estimate.

        A safe layout does not pass if the limit is lower than when it was judged, as it can be for a fallback layout.
        The estimate then decides.
        """
        return limit_bytes >= self.limit_bytes if self.safe else self.tight and limit_bytes >= self.device_bytes

    def refuses(self, limit_bytes: int) -> bool:
        """Whether the layout is refused on a device that may be filled up to `limit_bytes`, whatever its estimate."""
        return not self.safe and not self.allows(limit_bytes)


FEWEST_AGREEING = 2  # runs


@dataclass(frozen=True)
class MeasuredStep:
    """The measured step time of one layout with its techniques, from runs of the same job: the median of `runs`, the
    newest of which is `run_id`. `agreeing` is the number of runs with the same step time, within the usual variation
    between repeats."""

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
        """Whether the measured step time replaces the predicted one when layouts are compared. A single run may have
        used a slow node, so it corrects all layouts equally instead."""
        return self.agreeing >= FEWEST_AGREEING


@dataclass(frozen=True)
class TimeEvidence:
    """What measured runs say about the step time of the chosen layout. `uncorrected_seconds` is predicted without any
    run, `predicted_seconds` with `correction`. If `measured` decides, its step time replaces both. Otherwise, what
    single runs show multiplies the step times of all layouts by `shared_factor`."""

    uncorrected_seconds: float
    predicted_seconds: float
    correction: TimeCorrection = NO_TIME_CORRECTION
    measured: MeasuredStep | None = None
    shared_factor: float = 1.0

    def as_json(self) -> dict[str, Any]:
        """Return the value of `step_evidence` in a plan's JSON."""
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
    """What measured runs teach about the plans of one recipe.

    `bound` is given by the store's runs at the recipe's risk, or None if the recipe names no risk. `correction` applies
    to every memory prediction. `support` counts the runs behind both, or is None if nobody looked. `own_runs` are runs
    in the store that join the shipped ones when they are too few for a bound of their own. `rehearsals` apply only to
    the shapes that were rehearsed. `stops` is how often runs are stopped unplanned.

    `time` applies to every step time. A step time in `measured_steps` that decides replaces the prediction for its own
    layout; `shared_factor` is what the others show about all layouts of the job. `time_error` is the mean error of
    corrected step times on runs that the factors had not seen, or None without a calibration.
    """

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
    """Return the support of a plan without comparable runs: on a new accelerator, or without a calibration in use."""
    return Support(0, reason, of_family=0, of_version=0, widened=reason)


def unmeasured_support(recipe: Recipe) -> Support:
    """Return the support of a plan whose backend has no measured run here, or whose recipe uses no calibration."""
    if recipe.memory.calibration == NO_CALIBRATION:
        return no_support("the recipe takes no calibration")
    where = f"{recipe.backend.framework} on {recipe.cluster.accelerator.name}"
    return no_support(f"no measured run of {where} yet. After your first run: llmlaunch collect")
