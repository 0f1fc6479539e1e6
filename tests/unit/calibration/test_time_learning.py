"""Factors of step times are found where the runs show them, and none where they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmlaunch.calibration.calibrations import calibration_of_json
from llmlaunch.calibration.factors import FEWEST_TIMED_RUNS, TimedRuns
from llmlaunch.calibration.learning import LearningResult, learn
from llmlaunch.calibration.records import time_class
from llmlaunch.cluster.load import load_cluster
from llmlaunch.timing.correction import TimeCorrection
from support.timed_runs import dense_class, timed


def learned(hidden: TimeCorrection, noise: float = 0.0, places: range = range(9)) -> LearningResult:
    return learn(TimedRuns(dense_class(), timed(hidden, noise, places)), None, 1.8e9, "0.1", "e" * 64)


def test_a_slow_device_is_found_in_every_layout() -> None:
    result = learned(TimeCorrection(compute=1.1), noise=0.01)
    assert result.refusal is None
    assert result.calibration is not None
    assert result.calibration.correction.compute == pytest.approx(1.1, abs=0.02)
    assert result.calibration.before.mape > 0.07
    assert result.calibration.after.mape < 0.015


def test_a_slow_link_is_told_apart_from_a_slow_device() -> None:
    result = learned(TimeCorrection(compute=1.1, node=1.5), noise=0.005)
    assert result.calibration is not None
    factors = result.calibration.correction.factors
    assert factors["compute"] == pytest.approx(1.1, abs=0.04)
    assert factors["node"] > 1.2
    assert factors["host"] == 1.0, "nothing here waits for the host"


def test_where_nothing_is_wrong_nothing_is_learned() -> None:
    result = learned(TimeCorrection(), noise=0.03)
    assert result.refusal == "no factor predicts unseen runs better than none does"


def test_too_few_configurations_are_refused_and_one_model_is_enough() -> None:
    few = learned(TimeCorrection(compute=1.2), places=range(FEWEST_TIMED_RUNS - 1))
    assert few.calibration is None
    assert few.refusal == "3 configurations are needed whose step was timed; the store holds 2"
    enough = learned(TimeCorrection(compute=1.2), noise=0.01, places=range(FEWEST_TIMED_RUNS))
    assert enough.refusal is None


def test_one_wrong_measurement_moves_little() -> None:
    runs = timed(TimeCorrection(compute=1.1), noise=0.005)
    runs[3] = replace(runs[3], seconds=4.0 * runs[3].seconds)
    result = learn(TimedRuns(dense_class(), runs), None, 1.8e9, "0.1", "e" * 64)
    assert result.calibration is not None
    assert result.calibration.correction.compute == pytest.approx(1.1, abs=0.06)


def test_one_that_was_learned_before_is_not_left_for_a_worse_one() -> None:
    first = learned(TimeCorrection(compute=1.1), noise=0.005).calibration
    assert first is not None
    noisy = timed(TimeCorrection(compute=1.1), noise=0.005)
    swapped = [replace(run, seconds=run.seconds * (1.3 if place % 2 else 0.77)) for place, run in enumerate(noisy)]
    result = learn(TimedRuns(dense_class(), swapped), first, 1.9e9, "0.1", "e" * 64)
    assert result.refusal is not None


def test_a_calibration_is_the_same_after_json() -> None:
    calibration = learned(TimeCorrection(compute=1.1), noise=0.01).calibration
    assert calibration is not None
    assert calibration_of_json(calibration.as_json()) == calibration
    assert calibration.id == "time-megatron-dense-h100-80gb-20270115T080000Z"


def test_a_class_is_a_machine_whatever_its_profile_is_called() -> None:
    ours = dense_class()
    renamed = load_cluster({"base": "h100-80gb-x8", "name": "ours"})
    slower = load_cluster({"base": "h100-80gb-x8", "links": {"fabric": {"gigabytes_per_second": 25}}})
    assert time_class("megatron", False, renamed) == ours
    assert time_class("megatron", False, slower) != ours
    assert time_class("megatron", True, renamed) != ours
