"""What the default margin does to runs that fitted and runs that died, none of them judged by its own family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmlaunch.accuracy.summary import upper_share, verdicts
from llmlaunch.calibration.records import read_records
from llmlaunch.cluster.cards import machines
from validation.scoring import scores_of

DATA = Path(__file__).parents[2] / "data" / "measurements"
# Each is looked into in docs/accuracy.md.
DEATHS_CALLED_SAFE = {"bigscience-03206"}


@pytest.fixture(scope="module")
def classes() -> list[dict[str, Any]]:
    records = [record for name in ("outcomes", "released_outcomes") for record in read_records(DATA / f"{name}.jsonl")]
    return verdicts(scores_of(records, machines()))


def refused(classes: list[dict[str, Any]]) -> float:
    fits = sum(entry["fits"] for entry in classes)
    return sum(entry["fits_called_tight"] + entry["fits_called_unsafe"] for entry in classes) / fits


def test_no_death_is_called_safe_that_is_not_explained(classes: list[dict[str, Any]]) -> None:
    assert {name for entry in classes for name in entry["deaths_called_safe_ids"]} <= DEATHS_CALLED_SAFE
    assert sum(entry["deaths"] for entry in classes) == 81


def test_few_runs_that_fitted_are_not_called_safe_and_far_fewer_than_by_the_80_percent_rule(
    classes: list[dict[str, Any]],
) -> None:
    assert sum(entry["fits"] for entry in classes) == 402
    assert refused(classes) <= 0.09
    assert refused([entry for entry in classes if entry["family"].startswith("nvidia")]) <= 0.06
    assert sum(entry["fujii_fits_not_called_safe"] for entry in classes) > 3 * refused(classes) * 402


@pytest.mark.parametrize(("events", "trials", "share"), [(0, 59, 0.05), (0, 1, 0.95), (1, 63, 0.073), (3, 3, 1.0)])
def test_the_bound_of_a_share_is_clopper_and_pearsons(events: int, trials: int, share: float) -> None:
    assert upper_share(events, trials) == pytest.approx(share, abs=1e-3)


def test_there_is_no_share_of_nothing() -> None:
    assert upper_share(0, 0) is None
