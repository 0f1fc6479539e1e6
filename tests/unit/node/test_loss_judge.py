"""A loss that goes bad is named within a few lines, and a healthy one never: curves of real runs, and made-up ones."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlaunch.frameworks.logs import any_script_lines, known_trainers_lines
from llmlaunch.node.watchdog import NOT_FINITE_LINES, SPIKE_LINES, LossJudge
from llmlaunch.rundir.step_lines import Step, StepLines
from support.step_lines import parser_of

LOGS = Path(__file__).parents[2] / "data" / "logs"


def judged(losses: Sequence[float | None], judge: LossJudge | None = None, first: int = 1) -> list[tuple[int, str]]:
    """Return what is said of a curve, each with the step at which it is said."""
    judge = judge or LossJudge()
    sentences = ((step, judge.judge(Step(step, loss=loss))) for step, loss in enumerate(losses, start=first))
    return [(step, sentence) for step, sentence in sentences if sentence]


def falling(steps: int, seed: int = 0, noise: float = 0.03, floor: float = 2.0, warmup: int = 50) -> list[float]:
    """A power law from ln(vocabulary) down to `floor`, flat while the learning rate warms up, with relative noise that
    keeps a part of itself from step to step and now and then is three times as large."""
    random_numbers = random.Random(seed)
    drift, losses = 0.0, []
    for step in range(steps):
        trained = max(0.0, step - warmup / 2)
        mean = floor + (11.0 - floor) * (1.0 + trained / 40.0) ** -0.6
        drift = 0.5 * drift + random_numbers.gauss(0.0, noise)
        width = 3.0 if random_numbers.random() < 0.01 else 1.0
        losses.append(mean * max(0.1, 1.0 + width * drift))
    return losses


@given(
    st.integers(0, 10**6), st.floats(0.0, 0.2), st.floats(0.01, 4.0), st.integers(0, 300), st.sampled_from([1, 10, 100])
)
@settings(max_examples=20, deadline=None)
def test_a_healthy_curve_gives_no_alarm(seed: int, noise: float, floor: float, warmup: int, interval: int) -> None:
    assert judged(falling(2000, seed, noise, floor, warmup)[::interval]) == []


@given(st.integers(0, 10**6), st.floats(0.0, 0.05), st.integers(200, 900), st.sampled_from([1.5, 2.0, 5.0, 100.0]))
@settings(max_examples=20, deadline=None)
def test_a_spike_that_stays_is_named_within_five_lines(seed: int, noise: float, at: int, factor: float) -> None:
    losses = falling(1000, seed, noise, warmup=0)
    level = max(losses[at - 100 : at]) * factor
    told = judged([*losses[:at], *(level * (1.0 + 0.01 * (step % 3)) for step in range(100))])
    assert [step for step, _ in told] == [at + SPIKE_LINES]
    assert f"the loss has spiked since step {at + 1}, now " in told[0][1]


@given(st.integers(1, 900), st.sampled_from([math.nan, math.inf, -math.inf]))
@settings(max_examples=10, deadline=None)
def test_nan_and_infinity_are_named_at_once_and_once(at: int, value: float) -> None:
    judge = LossJudge()
    losses = falling(at - 1)
    told = judged([*losses, *[value] * 50], judge)
    word = "NaN" if math.isnan(value) else "infinite"
    assert told == [(at, f"the loss is {word} since step {at}")]
    assert judge.bad is not None
    assert (judge.bad["since_step"], judge.bad["good_step"]) == (at, at - 1 or None)


@given(st.integers(0, 10**6), st.lists(st.integers(60, 900), max_size=8, unique=True))
@settings(max_examples=10, deadline=None)
def test_single_outliers_that_recover_are_no_spikes(seed: int, places: list[int]) -> None:
    losses = falling(1000, seed)
    for place in places:
        losses[place] *= 10.0
    if all(abs(one - other) > SPIKE_LINES for one in places for other in places if one != other):
        assert judged(losses) == []


def test_a_spike_that_goes_away_is_said_to_be_over() -> None:
    losses = falling(300)
    told = judged([*losses, *[9.0] * 12, *[losses[-1]] * 50])
    assert [step for step, _ in told] == [305, 317]
    assert told[0][1].startswith("the loss has spiked since step 301, now 9; it was ")
    assert told[1][1] == f"the loss is as usual again since step 313: {losses[-1]:.4g}"


def test_a_loss_that_flickers_between_nan_and_a_number_is_one_event() -> None:
    flicker = [value for loss in falling(60) for value in (loss, math.nan)]
    assert [sentence for _, sentence in judged(flicker)] == ["the loss is NaN since step 2"]


def test_a_loss_that_stays_high_is_said_once_and_stays_bad() -> None:
    judge = LossJudge()
    assert len(judged([*falling(300), *[9.0] * 1000], judge)) == 1
    assert judge.lasting


def test_a_spike_that_turns_into_nan_is_said_to() -> None:
    told = judged([*falling(300), *[9.0] * 6, *[math.nan] * 6])
    assert [step for step, _ in told] == [305, 307]
    assert told[1][1] == "the loss is NaN since step 307"


def test_nan_lasts_from_the_second_line_on_since_a_step_that_overflowed_may_have_been_skipped() -> None:
    judge = LossJudge()
    judged(falling(30), judge)
    lasting = []
    for step in range(31, 31 + NOT_FINITE_LINES):
        judge.judge(Step(step, loss=math.nan))
        lasting.append(judge.lasting is not None)
    assert lasting == [False, True]
    judge.judge(Step(40, loss=3.0))
    assert judge.lasting is None


def test_it_is_in_doubt_from_the_first_bad_line_until_the_loss_is_as_usual_again() -> None:
    judge = LossJudge()
    judged(falling(30), judge)
    doubts = []
    for step, loss in enumerate([3.0, math.nan, *[3.0] * SPIKE_LINES], start=31):
        judge.judge(Step(step, loss=loss))
        doubts.append(judge.in_doubt)
    assert doubts == [False, *[True] * SPIKE_LINES, False]


def test_lines_of_several_ranks_about_one_step_count_once() -> None:
    judge = LossJudge()
    judged(falling(100), judge)
    assert [judge.judge(Step(101, loss=50.0)) for _ in range(64)] == [""] * 64
    assert judge.lasting is None


def test_a_line_without_a_loss_says_nothing() -> None:
    assert judged([None, *falling(50), None, None]) == []


def test_after_a_rollback_the_limit_of_before_judges_the_first_lines() -> None:
    assert judged([4.0] * 10, LossJudge(limit=3.0), first=801) == [(805, "the loss has spiked since step 801, now 4")]
    assert judged([2.9] * 10, LossJudge(limit=3.0), first=801) == []


def test_a_loss_that_never_varies_may_rise_by_a_tenth() -> None:
    assert judged([*[2.0] * 100, *[2.19] * 50]) == []
    assert [step for step, _ in judged([*[2.0] * 100, *[2.21] * 50])] == [105]


def _lines(name: str) -> Iterator[bytes]:
    return iter((LOGS / name).read_bytes().splitlines())


@pytest.mark.parametrize("name", ["megatron-core-0.19.log", "deepspeed-0.19.log"])
def test_real_logs_give_no_alarm(name: str) -> None:
    judge, steps = LossJudge(), parser_of(any_script_lines(0)).read(_lines(name)).steps
    assert steps
    assert [judge.judge(step) for step in steps] == [""] * len(steps)


MEGATRON = (
    " [2026-01-01 00:00:00] iteration {step:8d}/    1000 | consumed samples: 8 | "
    "elapsed time per iteration (ms): 812.5 | learning rate: 1.0E-04 | global batch size: 8 |{loss} loss scale: 1.0 |"
    "{norm} number of skipped iterations:   0 | number of nan iterations:   {nan} |"
)


@pytest.mark.parametrize(
    ("norm", "nan", "loss"),
    [(" grad norm: nan |", 0, ""), ("", 1, ""), ("", 1, " lm loss: 2.3E+00 |"), ("", 0, " lm loss: nan |")],
)
def test_megatron_says_nan_in_several_ways(norm: str, nan: int, loss: str) -> None:
    parser: StepLines = parser_of(known_trainers_lines())
    line = MEGATRON.format(step=17, loss=loss, norm=norm, nan=nan).encode()
    step = parser.step_of(line)
    assert step is not None
    assert LossJudge().judge(step) == "the loss is NaN since step 17"
