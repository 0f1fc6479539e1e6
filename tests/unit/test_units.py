"""Sizes and times are written in the digits and the unit a person would use."""

from __future__ import annotations

import math

import pytest

from llmlaunch.units import DAY, GIB, duration, gib


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (45, "45 s"),
        (200, "3 min"),
        (7200, "2 h 0 min"),
        (3 * DAY, "3 d 0 h"),
        (5e9, "57,870 d 8 h"),
        (1e10, "?"),
        (math.inf, "?"),
        (math.nan, "?"),
    ],
)
def test_a_duration_has_the_unit_a_person_would_use(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("gibibytes", "text"), [(0.4321, "0.43"), (7.21, "7.21"), (63.34, "63.3"), (-0.5, "-0.50")])
def test_a_size_has_as_many_digits_as_matter(gibibytes: float, text: str) -> None:
    assert gib(gibibytes * GIB) == text
