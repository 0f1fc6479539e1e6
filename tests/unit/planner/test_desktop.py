"""A card that drives a screen has less for the job: what the profile says is subtracted from every limit."""

from __future__ import annotations

import pytest

from llmlaunch.calibration.margins import device_margin
from llmlaunch.units import GIB
from support.recipes import recipe_of


@pytest.mark.parametrize("policy", [(), ("memory={limit: 0.8}",), ("memory={risk: 0.01}",)])
def test_what_a_desktop_holds_is_subtracted_from_the_limit(policy: tuple[str, ...]) -> None:
    alone = device_margin(recipe_of("llama3.2-1b", "cluster={base: rtx-4090-x2, desktop_gib: 0}", *policy))
    shared = device_margin(recipe_of("llama3.2-1b", "cluster=rtx-4090-x2", *policy))
    assert alone.limit_bytes - shared.limit_bytes == GIB // 2
    assert alone.most_bytes - shared.most_bytes == GIB // 2
    assert "a desktop holds 0.5 GiB of each device" in shared.reason
    assert "desktop" not in alone.reason


def test_what_a_desktop_holds_counts_in_the_stated_risk() -> None:
    alone = device_margin(recipe_of("llama3.2-1b", "cluster={base: h100-80gb-x8, desktop_gib: 0}"))
    shared = device_margin(recipe_of("llama3.2-1b", "cluster={base: h100-80gb-x8, desktop_gib: 4}"))
    needed = alone.limit_bytes
    assert (alone.risk_of(needed) or 1.0) <= 0.07 < (shared.risk_of(needed) or 0.0)
