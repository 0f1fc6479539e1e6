"""A card that drives a screen has less for the job: what the profile says is subtracted from every limit."""

from __future__ import annotations

import pytest

from llmlaunch.planner.setting import memory_limit
from llmlaunch.units import GIB
from support.recipes import recipe_of


@pytest.mark.parametrize("policy", [(), ("memory={limit: 0.8}",), ("memory={risk: 0.01}",)])
def test_what_a_desktop_holds_is_subtracted_from_the_limit(policy: tuple[str, ...]) -> None:
    alone = memory_limit(recipe_of("llama3.2-1b", "cluster={base: rtx-4090-x2, desktop_gib: 0}", *policy))
    shared = memory_limit(recipe_of("llama3.2-1b", "cluster=rtx-4090-x2", *policy))
    assert alone.limit_bytes - shared.limit_bytes == GIB // 2
    assert alone.most_bytes - shared.most_bytes == GIB // 2
    assert "a desktop holds 0.5 GiB of each device" in shared.reason
    assert "desktop" not in alone.reason
