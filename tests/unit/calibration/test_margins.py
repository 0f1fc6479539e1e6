"""The bound holds as often as it says, whatever the scores look like, and a death never lowers it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from llmlaunch.calibration import ratios
from llmlaunch.calibration.evidence import no_bound_sentence, runs_needed
from llmlaunch.calibration.ratios import DEATH, Bound, Score, upper_ratio
from support.soak import SOAK, examples

RISKS = st.sampled_from([0.5, 0.3, 0.25, 0.2, 0.1, 0.05])
LIVED = st.floats(0.2, 5.0, allow_nan=False)
SCORES = st.lists(st.one_of(LIVED, st.just(DEATH)), max_size=60)


def bound(scores: list[float], risk: float) -> float:
    ratio = upper_ratio(scores, risk)
    return math.inf if ratio is None else ratio


@examples(10, 2000)
@given(st.lists(LIVED, min_size=2, max_size=60), RISKS)
def test_whichever_run_is_the_next_one_at_most_the_risk_exceeds_what_the_others_give(
    scores: list[float], risk: float
) -> None:
    # exchangeable runs: each is as likely as any other to be the one that comes last, so this share is the coverage
    assume(len(scores) - 1 >= runs_needed(risk))
    within = [score <= bound(scores[:i] + scores[i + 1 :], risk) for i, score in enumerate(scores)]
    assert sum(within) >= (1 - risk) * len(scores) - 1e-9


@pytest.mark.parametrize("seed", range(3) if SOAK else range(1))
def test_deaths_seen_only_as_deaths_keep_the_promise(seed: int) -> None:
    # the true score of a run that died is above what its card allows, and is never seen
    random, trials, runs, risk = np.random.default_rng(seed), 4000, 60, 0.1
    true = 1.0 + random.standard_t(3, size=(trials, runs + 1)) * 0.2
    card = random.uniform(1.0, 2.0, size=(trials, runs))
    observed = np.where(true[:, :-1] > card, DEATH, true[:, :-1])
    within = sum(row[-1] <= bound(list(scores), risk) for row, scores in zip(true, observed, strict=True))
    assert within / trials >= 1 - risk - 3 * math.sqrt(risk * (1 - risk) / trials)


@examples(10, 2000)
@given(SCORES, RISKS)
def test_a_death_never_lowers_the_bound_nor_makes_one(scores: list[float], risk: float) -> None:
    before, after = upper_ratio(scores, risk), upper_ratio([*scores, DEATH], risk)
    if after is not None:
        assert before is not None
        assert after >= before


@examples(10, 2000)
@given(SCORES, RISKS, RISKS)
def test_less_risk_is_never_a_lower_bound(scores: list[float], first: float, other: float) -> None:
    assert bound(scores, min(first, other)) >= bound(scores, max(first, other))


@pytest.mark.parametrize(("risk", "needed"), [(0.5, 1), (0.1, 9), (0.05, 19), (0.03, 33), (0.01, 99), (0.001, 999)])
def test_a_risk_is_bounded_from_just_the_runs_it_needs(risk: float, needed: int) -> None:
    assert runs_needed(risk) == needed
    scores = [1.0 + i / 1000 for i in range(needed)]
    assert upper_ratio(scores, risk) == scores[-1]
    assert upper_ratio(scores[1:], risk) is None


def test_no_bound_is_said_with_its_numbers() -> None:
    assert no_bound_sentence(0.01, 3) == "risk 0.01 needs 99 comparable runs, the store holds 3"
    assert "5 of the 120 comparable runs" in no_bound_sentence(0.01, 120, died=5)


def bound_at(risk: float, runs: Sequence[tuple[float, float | None]]) -> Bound:
    return ratios.bound_at(risk, [Score(ratio, "device", "dense gated", None, share) for ratio, share in runs])


def test_the_worse_bound_counts_where_enough_runs_are_near_the_limit() -> None:
    far = [(1.0, 0.1)] * 30
    near = [(1.1, 0.9)] * 9
    bound = bound_at(0.1, [*far, *near])
    assert (bound.runs, bound.near_limit_runs) == (39, 9)
    assert (bound.ratio, bound.near_limit_ratio, bound.worse) == (1.1, 1.1, 1.1)
    diluted = bound_at(0.1, [*far * 10, *near])
    assert (diluted.ratio, diluted.worse) == (1.0, 1.1)
    few = bound_at(0.1, [*far * 10, *near[:8], (1.1, None)])
    assert (few.near_limit_runs, few.near_limit_ratio, few.worse) == (8, None, 1.0)
    assert replace(bound, near_limit_ratio=1.01).worse == 1.1
    assert replace(bound, ratio=None, near_limit_ratio=1.0).worse is None


def test_deaths_near_the_limit_leave_no_bound() -> None:
    bound = bound_at(0.1, [*[(1.0, 0.2)] * 100, *[(1.0, 0.9)] * 9, (DEATH, 0.9), (DEATH, 0.95)])
    assert bound.ratio == 1.0
    assert bound.near_limit_ratio is None
    assert bound.worse is None
