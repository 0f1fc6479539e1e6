"""What measured runs say of a plan: how many there are, the bound they give, and what is new to them."""

from __future__ import annotations

import math

import pytest

from llmlaunch.calibration.ratios import (
    DEATH,
    RESIDENT,
    RunClass,
    ratio_bound,
    support_of,
    trusted_correction,
    upper_ratio,
)
from llmlaunch.memory.job import Correction
from support.calibrated import score

LLAMA = RunClass("H100", "dense gated", "0.19.1")
DENSE = [score(0.95 + i / 200, version="0.19.0") for i in range(30)]
MIXTURES = [score(1.00 + i / 200, "mixture gated", "0.19.0") for i in range(30)]


def test_the_runs_of_the_plan_s_kind_are_counted() -> None:
    older = [score(1.0, version="0.16.1"), score(1.0, version=None)]
    evidence = support_of([*DENSE, *MIXTURES, *older], LLAMA, "an id")
    assert evidence.as_json() == {
        "runs": 62,
        "of_family": 32,
        "of_version": 61,  # an unknown version may be this one
        "calibration": "an id",
        "widened": None,
    }
    assert evidence.sentence == (
        "62 runs on H100, 32 of this family of models (dense gated), 61 of version 0.19: none peaked more than 14.5 % "
        "above its prediction (calibration an id)"
    )


def test_deaths_are_counted_and_are_no_peak() -> None:
    evidence = support_of([*DENSE, score(DEATH), score(DEATH)], LLAMA)
    assert (evidence.runs, evidence.died) == (32, 2)
    assert evidence.highest == pytest.approx(1.095)
    assert "2 ran out of memory" in evidence.sentence


def test_kinds_of_peak_are_not_mixed() -> None:
    few = [score(1.3, kind="reserved") for _ in range(5)]
    assert support_of([*DENSE, *few, score(9.0, kind="allocated")], LLAMA).runs == 30
    assert support_of(few, LLAMA).runs == 5
    assert support_of([*DENSE, *few], LLAMA, risk=0.001).runs == 30, "the pool that has most"
    cpu = RunClass("cpu", "dense gated", None, RESIDENT)
    assert support_of([*DENSE, score(1.1, kind="resident")], cpu).runs == 1


def test_a_card_nobody_measured_has_nothing_behind_it() -> None:
    evidence = support_of([], LLAMA)
    assert (evidence.runs, evidence.of_family, evidence.of_version) == (0, 0, 0)
    assert evidence.widened == "no comparable run on H100 was measured"
    bound = ratio_bound([], LLAMA, 0.05)
    assert (bound.runs, bound.ratio) == (0, None)


def test_the_bound_is_that_of_all_comparable_runs() -> None:
    bound = ratio_bound([*DENSE, *MIXTURES], LLAMA, 0.05, "an id")
    assert bound.runs == 60
    assert bound.ratio == upper_ratio([entry.score for entry in (*DENSE, *MIXTURES)], 0.05)
    assert bound.widened is None
    assert "(calibration an id)" in bound.sentence
    assert "near the limit" not in bound.sentence


def test_runs_near_the_limit_decide_where_they_were_further_off_and_it_is_said() -> None:
    near = [score(1.05 + i / 1000, version="0.19.0", share=0.8) for i in range(20)]
    far = [score(0.95, version="0.19.0", share=0.1) for _ in range(500)]
    bound = ratio_bound([*near, *far], LLAMA, 0.05)
    assert bound.ratio == pytest.approx(1.069)
    assert bound.sentence.endswith("by the 20 of them that were near the limit")
    assert ratio_bound([*near[:18], *far], LLAMA, 0.05).ratio == pytest.approx(0.95), "too few to bound anything"


def test_runs_of_the_same_version_alone_where_they_suffice() -> None:
    older = [score(2.0, version="0.16.0") for _ in range(30)]
    bound = ratio_bound([*DENSE, *older], LLAMA, 0.05)
    assert (bound.runs, bound.widened) == (30, None)
    assert bound.ratio == upper_ratio([entry.score for entry in DENSE], 0.05)


def test_a_new_family_gets_the_worst_bound_of_any_known_one() -> None:
    run_class = RunClass("H100", "dense ungated", "0.19.1")
    bound = ratio_bound([*DENSE, *MIXTURES], run_class, 0.05)
    assert bound.ratio == max(upper_ratio([entry.score for entry in group], 0.05) or 0 for group in (DENSE, MIXTURES))
    assert bound.ratio > (ratio_bound([*DENSE, *MIXTURES], LLAMA, 0.05).ratio or 0)
    assert "no run is of a dense ungated model" in str(bound.widened)
    assert str(bound.widened) in bound.sentence


def test_a_family_of_too_few_runs_counts_with_its_highest() -> None:
    run_class = RunClass("H100", "dense ungated", None)
    bound = ratio_bound([*DENSE, score(1.4, "mixture gated")], run_class, 0.05)
    assert bound.ratio == 1.4


def test_one_known_family_says_nothing_of_another() -> None:
    bound = ratio_bound(MIXTURES, LLAMA, 0.05)
    assert bound.ratio is None
    assert "one other kind does not say how far kinds differ" in bound.sentence
    assert support_of(MIXTURES, LLAMA).widened == (
        "no run is of a dense gated model: nothing is taken off the prediction for the others"
    )


def test_a_family_that_died_leaves_no_bound_for_another() -> None:
    run_class = RunClass("H100", "dense ungated", None)
    bound = ratio_bound([*DENSE * 4, score(DEATH, "mixture gated")], run_class, 0.05)
    assert bound.ratio is None
    assert "ran out of memory" in bound.sentence


def test_a_version_with_too_few_runs_gets_the_worst_bound_of_any_version() -> None:
    older = [score(1.2 + i / 1000, version="0.16.0") for i in range(20)]
    few = [score(1.0, version="0.20.0") for _ in range(3)]
    run_class = RunClass("H100", "dense gated", "0.20.1")
    bound = ratio_bound([*DENSE, *older, *few], run_class, 0.05)
    assert bound.ratio == pytest.approx(1.219)
    assert "3 are of version 0.20" in str(bound.widened)
    assert ratio_bound([*DENSE, *older], RunClass("H100", "dense gated", None), 0.05).widened is None, (
        "version not known"
    )


def test_reserved_peaks_never_bound_below_one() -> None:
    low = [score(0.8, version="0.19.0", kind="reserved") for _ in range(20)]
    assert ratio_bound(low, LLAMA, 0.05).ratio == 1.0


def test_nothing_is_taken_off_a_prediction_for_runs_of_another_kind() -> None:
    less, more = Correction(-0.05, -1e9, "an id"), Correction(0.05, 1e9, "an id")
    familiar, new = support_of(DENSE, LLAMA), support_of(MIXTURES, LLAMA)
    assert trusted_correction(less, familiar) == less
    assert trusted_correction(less, new) == Correction(0.0, 0.0, "an id")
    assert trusted_correction(more, new) == more
    assert math.isclose(trusted_correction(Correction(0.05, -1e9, "an id"), new).outside_bytes, 0.0)
