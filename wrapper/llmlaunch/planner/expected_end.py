"""When a job is expected to end: saves on the way, stops that nobody planned, and predictions that may be off.

A job is a row of equal segments, each the steps between two saves and the save. Stops are a Poisson process. One that
falls into a segment loses what the segment had done and the time to come back; then the segment begins again, as often
as it takes. Of each equally likely rate of stops many histories are sampled, with a fixed seed: how often a segment is
begun anew, how long the attempts lasted that were lost, and a step time that is off by a gamma-distributed factor with
the median 1.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llmlaunch.calibration.lessons import Lessons
from llmlaunch.calibration.step_time_errors import JobKind, job_kind, step_time_error
from llmlaunch.columns import FloatColumn
from llmlaunch.frameworks.checkpoints import expected_save_seconds, pause_seconds, resume_seconds
from llmlaunch.frameworks.framework import framework_of
from llmlaunch.frozen import frozen
from llmlaunch.planner.plan import Candidate, ExpectedEnd, JobLength
from llmlaunch.recipe.training import AUTO_INTERVAL
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir.values import counted
from llmlaunch.techniques import Techniques
from llmlaunch.units import DAY, HOUR, MINUTE, duration

HISTORIES = 2048  # of each rate: an end is then within 1 % of that of any other seed
SEED = 0
HOPELESS = 30.0  # stops in a segment: it ends once in 10**13 attempts
LEAST_SPREAD = 0.03  # of a layout that ran before: other nodes, other neighbours on the network
DEVIATION_OF_MEAN_ERROR = 1.25  # standard deviation of a normal distribution by its mean absolute error
# Daly's optimum is flat: twice as often or half as often costs little. Fewer saves than these bounds risk more than the
# rate knows of (preemption, maintenance, a person's mistake); more fill the disk.
LEAST_INTERVAL_SECONDS, MOST_INTERVAL_SECONDS = 10.0 * MINUTE, 4.0 * HOUR


def expected_end(recipe: Recipe, chosen: Candidate, lessons: Lessons, ran_before: bool = False) -> ExpectedEnd:
    """Return when the job of `recipe` is expected to end under the layout that was chosen, and how often it saves;
    `ran_before` says that the step time is what runs of this very layout took."""
    step_seconds, stops = chosen.step_seconds, lessons.stops
    length = JobLength.of(recipe, step_seconds)
    saves = recipe.training.checkpoint_path is not None
    write_seconds = expected_save_seconds(recipe, chosen.layout) if saves else 0.0
    save_seconds = pause_seconds(recipe, chosen.layout) if saves else 0.0
    between = HOUR / (stops.per_device_hour * recipe.world_size)
    interval, reason = _interval(recipe, step_seconds, save_seconds, between, write_seconds)
    often = recipe.training.non_persistent_save_interval
    resume = resume_seconds(recipe, write_seconds)
    spread, spread_source = _spread(recipe, chosen, lessons, ran_before)
    between_saves = interval if interval is None else min(interval, often or interval)
    distribution = EndDistribution(
        work_seconds=length.seconds,
        spread=LEAST_SPREAD if spread is None else spread,
        segments=1.0 if between_saves is None else max(length.steps / between_saves, 1.0),
        save_seconds=save_seconds,
        # what was done while the last checkpoint was still being written beside the steps is lost, too
        resume_seconds=resume + (write_seconds - save_seconds),
        stops_per_second=stops.equally_likely * recipe.world_size / HOUR,
    )
    days = recipe.budget.days
    return ExpectedEnd(
        p50_seconds=distribution.quantile(0.50),
        p95_seconds=None if spread is None else distribution.quantile(0.95),
        goodput=distribution.goodput,
        stops=distribution.expected_stops,
        device_hours_between_stops=1.0 / stops.per_device_hour,
        stops_source=stops.source,
        save_interval=interval,
        save_interval_reason=reason,
        non_persistent_interval=often,
        save_seconds=save_seconds if saves else None,
        resume_seconds=resume,
        step_time_spread=spread,
        step_time_source=spread_source,
        within_budget=None if days is None or spread is None else distribution.share_done_by(days * DAY),
    )


def _spread(recipe: Recipe, chosen: Candidate, lessons: Lessons, ran_before: bool) -> tuple[float | None, str]:
    """Return how far real step times are from predicted ones, as a relative standard deviation, and who says so. It is
    None where no run of this kind of job was measured: then the source says what was not."""
    if ran_before:
        return LEAST_SPREAD, "this layout ran before"
    if lessons.time_error is not None:
        return max(DEVIATION_OF_MEAN_ERROR * lessons.time_error, LEAST_SPREAD), "your calibration"
    kind = kind_of_job(recipe, chosen.techniques)
    error = step_time_error(kind)
    if kind is None:
        return None, "no measured run on such devices"
    if error is None:
        return None, f"no measured run of {kind.words}"
    if error.spread is None:
        return None, f"no more than {counted(error.runs, 'measured run')} of {kind.words}"
    return error.spread, f"{error.runs} public runs of {kind.measured_words}"


def kind_of_job(recipe: Recipe, techniques: Techniques) -> JobKind | None:
    """Return the kind of job by which step times were measured."""
    framework, accelerator = framework_of(recipe).timed_name(recipe), recipe.cluster.accelerator
    return job_kind(framework, recipe.model, techniques, accelerator, recipe.data.learns_answers)


def _interval(
    recipe: Recipe, step_seconds: float, save_seconds: float, seconds_between_stops: float, write_seconds: float
) -> tuple[int | None, str | None]:
    """Return the steps between two saves, None without saves, and why, where the recipe leaves it open. A save that is
    written beside the steps has ended before the next begins."""
    training = recipe.training
    if training.checkpoint_path is None or training.save_interval != AUTO_INTERVAL:
        return training.save_interval, None
    best = best_interval_seconds(save_seconds, seconds_between_stops)
    seconds = min(max(best, LEAST_INTERVAL_SECONDS), MOST_INTERVAL_SECONDS)
    if training.async_save:
        seconds = max(seconds, write_seconds)
    steps = min(max(round(seconds / step_seconds), 1), max(training.steps, 1))
    reason = (
        f"Young and Daly's optimum, {duration(best)}, for a save of {duration(save_seconds)} and a stop every "
        f"{duration(seconds_between_stops)}"
    )
    if seconds != best:
        reason += f"; bounded to {duration(seconds)}"
    return steps, reason


def best_interval_seconds(save_seconds: float, seconds_between_stops: float) -> float:
    """Return the seconds of training between two saves that make the job end soonest on average.

    The time a second of training takes is proportional to (exp(s / M) - 1) / x, with s = x + the save, and M the time
    between stops; it is least where 1 - x / M = exp(-s / M) (Daly 2006, whose square roots approximate it).
    """
    relative = save_seconds / seconds_between_stops
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        if 1.0 - middle > math.exp(-middle - relative):
            low = middle
        else:
            high = middle
    return 0.5 * (low + high) * seconds_between_stops


@frozen
class EndDistribution:
    """The distribution of the time a job takes. `work_seconds` are those of all steps if nothing happens and the
    prediction is right; `spread` is the relative deviation of the real ones from that; `stops_per_second` are equally
    likely rates. Arrays have an element for each of these rates."""

    work_seconds: float
    spread: float
    segments: float
    save_seconds: float
    resume_seconds: float
    stops_per_second: FloatColumn

    def quantile(self, share: float) -> float | None:
        """Return the seconds within which the job ends with the probability `share`; None where it never does."""
        end = float(self._ends[math.ceil(share * len(self._ends)) - 1])
        return end if math.isfinite(end) else None

    def share_done_by(self, seconds: float) -> float:
        """Return the probability that the job has ended after `seconds`."""
        return float(np.searchsorted(self._ends, seconds, side="right")) / len(self._ends)

    @property
    def expected_stops(self) -> float | None:
        """The mean number of stops; None where the job may never end."""
        return float(np.mean(self.segments * self._attempts_lost)) if np.all(self._hopeful) else None

    @property
    def goodput(self) -> float:
        """The share of the expected time in which the job makes steps that last, as `rundir.goodput` measures it but
        without the first start; 0 where it may never end."""
        if not np.all(self._hopeful):
            return 0.0
        return self.work_seconds / (self.work_seconds + float(np.mean(self._other_seconds)))

    @cached_property
    def _segment_seconds(self) -> float:
        return self.work_seconds / self.segments + self.save_seconds

    @cached_property
    def _stops_in_a_segment(self) -> FloatColumn:
        return self.stops_per_second * self._segment_seconds

    @cached_property
    def _hopeful(self) -> NDArray[np.bool_]:
        return self._stops_in_a_segment < HOPELESS

    @cached_property
    def _attempts_lost(self) -> FloatColumn:
        """The mean number of attempts at a segment that a stop ends."""
        return np.expm1(np.minimum(self._stops_in_a_segment, HOPELESS))

    @cached_property
    def _back_seconds(self) -> FloatColumn:
        """Mean seconds from a stop to the first new step; another stop on the way begins them anew."""
        stops = np.minimum(self.stops_per_second * self.resume_seconds, HOPELESS)
        return self.resume_seconds * np.where(stops > 0, np.expm1(stops) / np.where(stops > 0, stops, 1.0), 1.0)

    @cached_property
    def _lost(self) -> tuple[FloatColumn, FloatColumn]:
        """Mean and variance of the seconds that an attempt ended by a stop has lasted: a truncated exponential."""
        whole, stops = self._segment_seconds, np.minimum(self._stops_in_a_segment, HOPELESS)
        x = np.maximum(stops, 1e-3)  # below it the stop is as likely in every second
        cut = 1.0 / np.expm1(x)
        mean = np.where(stops > 1e-3, 1.0 / x - cut, 0.5)
        variance = np.where(stops > 1e-3, 1.0 / x**2 - cut * (1.0 + cut), 1.0 / 12.0)
        return whole * mean, whole**2 * variance

    @cached_property
    def _other_seconds(self) -> FloatColumn:
        """Mean seconds that saves and stops take."""
        each = self._lost[0] + self._back_seconds
        return self.segments * (self.save_seconds + self._attempts_lost * each)

    @cached_property
    def _ends(self) -> FloatColumn:
        """The seconds after which each sampled history ends, ascending; infinite where it never does."""
        random, size = np.random.default_rng(SEED), (len(self.stops_per_second), HISTORIES)
        factors = random.gamma(1.0 / self.spread**2, size=size)
        whole, stops = self._segment_seconds, np.minimum(self._stops_in_a_segment, HOPELESS)
        attempts = random.negative_binomial(self.segments, np.exp(-stops)[:, None], size)
        mean, variance = (column[:, None] for column in self._lost)
        lost = attempts * mean + np.sqrt(attempts * variance) * random.standard_normal(size)
        stopped = np.clip(lost, 0.0, attempts * whole) + attempts * self._back_seconds[:, None]
        ends = self.work_seconds * factors / np.median(factors) + self.segments * self.save_seconds + stopped
        return np.sort(np.where(self._hopeful[:, None], ends, np.inf), axis=None)
