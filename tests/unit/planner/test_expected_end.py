"""When a job is expected to end: laws of the distribution, against a simulation, and the interval between saves."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmlaunch.calibration.lessons import NO_LESSONS, PUBLISHED_RATE, Lessons, StopRate
from llmlaunch.frameworks.checkpoints import lead_seconds
from llmlaunch.planner.expected_end import (
    EndDistribution,
    best_interval_seconds,
    expected_end,
)
from llmlaunch.planner.plan import ExpectedEnd
from llmlaunch.planner.planning import make_sized_plan
from llmlaunch.recipe.types import Recipe
from llmlaunch.report.plan_text import length_lines
from llmlaunch.units import DAY, HOUR
from support.plans import gallery_setting, plan_of
from support.recipes import recipe_of, small

ADAPTED = ("training.start_from=/weights", "training.learning_rate=1.0e-4", "training.adapters={rank: 8}")
SAVED = ("training.checkpoint_path=/ckpt", "training.save_interval=100")


def end_of(recipe: Recipe, step_seconds: float = 10.0, stops: StopRate = PUBLISHED_RATE) -> ExpectedEnd:
    return expected_end(recipe, replace(plan_of("llama3-8b").chosen, step_seconds=step_seconds), Lessons(stops=stops))


def distribution(stops_in_all: float, days: float, segments: float, save: float, resume: float) -> EndDistribution:
    rates = PUBLISHED_RATE.equally_likely / PUBLISHED_RATE.per_device_hour * stops_in_all / (days * DAY)
    return EndDistribution(days * DAY, 0.1, segments, save, resume, rates)


SAVES = st.floats(0.0, 600.0)
RESUMES = st.floats(0.0, 7200.0)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.001, 300.0), st.floats(0.01, 100.0), st.floats(1.0, 5000.0), SAVES, RESUMES)
@example(stops=225.0, days=1.0, segments=18.0, save=0.0, resume=3097.0)  # likely ends lie 10**15 seconds apart
def test_half_is_never_later_than_95_percent_nor_sooner_than_without_stops(
    stops: float, days: float, segments: float, save: float, resume: float
) -> None:
    end = distribution(stops, days, segments, save, resume)
    half, late = end.quantile(0.5), end.quantile(0.95)
    assert 0.0 <= end.goodput <= 1.0
    if half is None:
        assert late is None
        return
    assert half >= end.work_seconds * (1 - 1e-3)
    assert late is None or late >= half
    assert end.share_done_by(half) == pytest.approx(0.5, abs=2e-3)
    assert end.share_done_by(0.5 * half) <= end.share_done_by(2 * half)


@settings(max_examples=40, deadline=None)
@given(st.floats(0.01, 50.0), st.floats(1.1, 10.0), st.floats(1.0, 1000.0), SAVES, RESUMES)
def test_more_stops_and_costlier_ones_never_end_a_job_sooner(
    stops: float, times: float, segments: float, save: float, resume: float
) -> None:
    end = distribution(stops, 10.0, segments, save, resume)
    worse = [
        replace(end, stops_per_second=end.stops_per_second * times),
        replace(end, resume_seconds=end.resume_seconds * times),
        replace(end, save_seconds=end.save_seconds * times),
    ]
    for share in (0.5, 0.95):
        before = end.quantile(share)
        for other in worse:
            after = other.quantile(share)
            assert after is None or (before is not None and after >= before * (1 - 2e-3))
    assert all(other.goodput <= end.goodput + 1e-9 for other in worse)


@pytest.mark.parametrize(
    ("segments", "save", "rates"),
    [(20, 100.0, (1e-6, 1e-5, 5e-5)), (1, 0.0, (1e-6, 1e-5, 3e-5))],
    ids=["with saves", "without"],
)
def test_it_agrees_with_a_simulation_of_each_stop(segments: int, save: float, rates: tuple[float, ...]) -> None:
    end = EndDistribution(1e5, 0.1, segments, save, 600.0, np.array(rates))
    times = np.array(simulated(end, 3000))
    for share in (0.5, 0.95):
        at = end.quantile(share)
        assert at is not None
        assert np.mean(times <= at) == pytest.approx(share, abs=0.03)
    assert end.work_seconds / end.goodput == pytest.approx(times.mean(), rel=0.06)


def simulated(end: EndDistribution, jobs: int) -> list[float]:
    """Return the times of so many jobs, every stop drawn with a fixed seed."""
    random = np.random.default_rng(1)
    shape, times = 1.0 / end.spread**2, []
    whole = end.work_seconds / end.segments + end.save_seconds
    for job in range(jobs):
        rate = end.stops_per_second[job % len(end.stops_per_second)]
        median = shape * (1.0 - 1.0 / (9.0 * shape)) ** 3
        seconds = end.work_seconds * (random.gamma(shape) / median - 1.0)
        for _ in range(int(end.segments)):
            while (stopped := random.exponential(1.0 / rate)) < whole:
                seconds += stopped
                while (again := random.exponential(1.0 / rate)) < end.resume_seconds:
                    seconds += again
                seconds += end.resume_seconds
            seconds += whole
        times.append(seconds)
    return times


def test_a_job_too_large_to_end_without_checkpoints_says_so() -> None:
    recipe = small("nodes=2048", "training.steps=400000")
    end = end_of(recipe)
    assert (end.p50_seconds, end.p95_seconds, end.stops, end.goodput) == (None, None, None, 0.0)
    saving = end_of(small("nodes=2048", "training.steps=400000", *SAVED))
    assert saving.p50_seconds is not None
    assert 0.5 < saving.goodput < 1.0


def test_llama_3_has_419_stops_in_54_days_on_16384_gpus() -> None:
    assert PUBLISHED_RATE.per_device_hour * 54 * 24 * 16_384 == pytest.approx(419)
    recipe = small("nodes=2048", "training.steps=466560", "training.checkpoint_path=/c", "training.save_interval=60")
    end = end_of(recipe)
    assert end.stops == pytest.approx(419, rel=0.15), "and some more while it comes back"
    assert 1.0 / PUBLISHED_RATE.per_device_hour == pytest.approx(50_700, rel=0.01)


def test_own_runs_decide_once_there_are_enough() -> None:
    few, many = StopRate(stops=1, device_hours=1000), StopRate(stops=200, device_hours=1e6)
    assert few.source == "Llama 3's rate"
    assert few.per_device_hour == pytest.approx(1.5 * PUBLISHED_RATE.per_device_hour, rel=0.02)
    assert many.per_device_hour == pytest.approx(200 / 1e6, rel=0.1)
    assert "200 stops in 1,000,000 GPU-hours" in many.source
    for rate in (PUBLISHED_RATE, few, many):
        quantiles = rate.equally_likely
        assert quantiles.mean() == pytest.approx(rate.per_device_hour)
        assert np.all(np.diff(quantiles) > 0)
        assert np.all(quantiles > 0)
    spread = [np.ptp(rate.equally_likely) / rate.per_device_hour for rate in (PUBLISHED_RATE, many)]
    assert spread[1] < 0.25 * spread[0], "what was measured is known better"


@settings(max_examples=60, deadline=None)
@given(st.floats(1.0, 2000.0), st.floats(1000.0, 1e8))
def test_the_interval_is_where_a_second_of_training_takes_least(save: float, between: float) -> None:
    best = best_interval_seconds(save, between)

    def cost(interval: float) -> float:
        return math.expm1((interval + save) / between) / interval

    assert cost(best) <= min(cost(0.9 * best), cost(1.1 * best))
    if save < 0.001 * between:
        assert best == pytest.approx(math.sqrt(2 * save * between), rel=0.05), "as Young's square root"


def test_auto_saves_at_the_optimum_within_bounds_and_says_why() -> None:
    auto = ("training.checkpoint_path=/ckpt", "training.save_interval=auto", "training.steps=100000")
    alone = end_of(small(*auto, "nodes=1"))
    assert alone.save_interval == 4 * HOUR / 10.0
    assert "bounded to 4 h" in str(alone.save_interval_reason)
    large = end_of(small(*auto, "nodes=256"))
    between = HOUR / (PUBLISHED_RATE.per_device_hour * 256 * 8)
    assert large.save_seconds is not None
    assert large.save_interval == round(best_interval_seconds(large.save_seconds, between) / 10.0)
    assert "bounded" not in str(large.save_interval_reason)
    for steps in (large.save_interval // 2, large.save_interval * 2):
        other = end_of(small(*auto[:1], "training.steps=100000", f"training.save_interval={steps}", "nodes=256"))
        assert other.goodput < large.goodput
        assert other.save_interval_reason is None
    short = end_of(small("training.checkpoint_path=/ckpt", "training.save_interval=auto", "training.steps=7"))
    assert short.save_interval == 7


def test_what_the_recipe_or_the_profile_says_of_saves_and_restarts_holds() -> None:
    site = small(*SAVED, "cluster.checkpoint_gigabytes_per_second=0.5", "cluster.resume_seconds=50")
    assert end_of(site).save_seconds == pytest.approx(8.03e9 * 14 / 0.5e9, rel=0.01)
    assert end_of(site).resume_seconds == 50
    own = small(*SAVED, "cluster.resume_seconds=50", "restart={save_seconds: 33, resume_seconds: 44}")
    assert (end_of(own).save_seconds, end_of(own).resume_seconds) == (33, 44)


def test_a_budget_of_days_has_a_probability() -> None:
    recipe = small("training.steps=10000", *SAVED)
    days = 10000 * 10.0 / DAY
    shares = [end_of(replace(recipe, budget=replace(recipe.budget, days=days * times))) for times in (0.5, 1.02, 2.0)]
    first, middle, last = (share.within_budget for share in shares)
    assert first is not None
    assert middle is not None
    assert last is not None
    assert first < 0.01 < 0.3 < middle < 0.7 < 0.99 < last


def test_a_step_time_that_is_known_better_spreads_the_end_less() -> None:
    recipe = small("training.steps=10000", *SAVED)
    learned = Lessons(time_error=0.04)
    ends = [
        expected_end(recipe, plan_of("llama3-8b").chosen, *how)
        for how in ((NO_LESSONS,), (learned,), (NO_LESSONS, True))
    ]
    assert [end.step_time_spread for end in ends] == [pytest.approx(0.09), pytest.approx(0.05), 0.03]
    assert [end.step_time_source for end in ends][1:] == ["your calibration", "this layout ran before"]
    assert ends[0].step_time_source == "142 public runs of Megatron dense models"
    late = [end.p95_seconds or 0.0 for end in ends]
    assert late[0] > late[1] > late[2]


MEASURED = {
    ("llama3-8b",): "Megatron dense models",
    ("mixtral-8x7b",): "Megatron mixtures, their tokens forced into equal shares for all experts",
    ("nemotron-3-nano",): "Megatron Mamba-2 mixtures",
    ("llama2-7b-deepspeed",): "Hugging Face dense models",
}
NOT_MEASURED = {
    ("llama2-7b-deepspeed", "model=mixtral-8x7b"): "Hugging Face mixtures",
    ("qwen3-next-80b-a3b",): "Megatron delta-net mixtures",
    ("llama3-8b", "cluster=mi300x-x8"): "on such devices",
}


@pytest.mark.parametrize("words", MEASURED)
def test_the_spread_is_that_of_the_backend_and_the_kind_of_model(words: tuple[str, ...]) -> None:
    end = end_of(recipe_of(*words))
    assert end.step_time_spread is not None
    assert f"public runs of {MEASURED[words]}" in end.step_time_source


@pytest.mark.parametrize("words", NOT_MEASURED)
def test_where_nothing_was_measured_no_spread_is_stated(words: tuple[str, ...]) -> None:
    """A Hugging Face mixture took 166 s a step where 6 were predicted: 95 % cannot be said of what nobody measured."""
    recipe = recipe_of(*words)
    end = end_of(recipe)
    assert end.step_time_spread is None
    assert (end.p95_seconds, end.within_budget) == (None, None)
    assert end.p50_seconds is not None
    assert end.p50_seconds >= recipe.training.steps * 10.0
    assert end.step_time_source.startswith("no measured run")
    assert NOT_MEASURED[words] in end.step_time_source


TRAINED_IN_PART = {
    ADAPTED: "Hugging Face dense models with adapters",
    ("training.trained_layers=2",): "Hugging Face dense models whose last layers alone",
}


@pytest.mark.parametrize("words", TRAINED_IN_PART)
def test_the_screen_says_how_far_step_times_are_off_where_that_is_known(words: tuple[str, ...]) -> None:
    _, plan = make_sized_plan(gallery_setting("llama2-7b-deepspeed", *words))
    assert plan.expected is not None
    assert TRAINED_IN_PART[words] in plan.expected.step_time_source
    spread, text = plan.expected.step_time_spread, " ".join("".join(length_lines(plan)).split())
    assert ("off by" in text) == (spread is not None)
    assert spread is None or f"step times are off by {spread:.0%}" in text


def test_conversations_are_a_kind_of_their_own() -> None:
    recipe = small()
    chats = replace(recipe, data=replace(recipe.data, format="chat"))
    assert end_of(recipe).step_time_spread is not None
    assert end_of(chats).step_time_source == "no measured run of Megatron dense models that learn conversations"


def test_a_save_written_beside_the_steps_holds_them_up_for_the_copy_alone_and_costs_more_when_it_stops() -> None:
    slow = ("restart={save_seconds: 900}",)
    at_once, beside = end_of(small(*SAVED, *slow)), end_of(small(*SAVED, *slow, "training.async_save=true"))
    assert at_once.save_seconds == 900.0
    assert beside.save_seconds is not None
    assert beside.save_seconds < 10.0
    assert beside.resume_seconds == at_once.resume_seconds
    assert at_once.p50_seconds is not None
    assert beside.p50_seconds is not None
    assert beside.p50_seconds < at_once.p50_seconds
    # as costly as a pause of that length, but for the steps that a stop takes back while it is written
    pause = f"restart={{save_seconds: {beside.save_seconds}, resume_seconds: {beside.resume_seconds}}}"
    quick = end_of(small(*SAVED, pause)).p50_seconds
    assert quick is not None
    assert beside.p50_seconds > quick


def test_auto_leaves_a_save_the_time_to_be_written_before_the_next_begins() -> None:
    auto = ("training.checkpoint_path=/ckpt", "training.save_interval=auto", "training.async_save=true")
    end = end_of(small(*auto, "restart={save_seconds: 6000}"))
    assert end.save_interval == 600


def test_the_last_save_before_a_time_limit_waits_for_the_writer() -> None:
    layout = plan_of("llama3-8b").chosen.layout
    beside = small(*SAVED, "training.async_save=true")
    assert lead_seconds(beside, layout, 10.0) == lead_seconds(small(*SAVED), layout, 10.0)


def test_what_a_stop_costs_is_bounded_by_the_checkpoints_of_which_the_newest_alone_stays() -> None:
    """They cost as much as any: as if all of them stayed."""
    beside = ("training.checkpoint_path=/ckpt", "training.async_save=true")
    seldom = end_of(small(*beside, "training.save_interval=1000"))
    often = end_of(small(*beside, "training.save_interval=1000", "training.non_persistent_save_interval=100"))
    all_stay = end_of(small(*beside, "training.save_interval=100"))
    assert (often.save_interval, often.non_persistent_interval) == (1000, 100)
    assert seldom.non_persistent_interval is None
    assert often.goodput == all_stay.goodput != seldom.goodput
