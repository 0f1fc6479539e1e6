"""A plan whose step waits for the network says on how many fewer nodes it would be faster, for a bounded cost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llmlaunch.layout import Layout
from llmlaunch.planner import fewer_and_faster
from llmlaunch.planner.changes import safe_layouts
from llmlaunch.planner.plan import Plan
from llmlaunch.planner.plan_json import plan_json
from llmlaunch.planner.planning import make_sized_plan
from llmlaunch.planner.setting import Setting
from llmlaunch.recipe.types import Recipe
from llmlaunch.report.check_screen import check_screen
from llmlaunch.report.terminal import Surface
from support.plans import setting_for
from support.recipes import recipe_of

LINKS = "links: {node: {gigabytes_per_second: 300, latency_microseconds: 5}, fabric: {gigabytes_per_second: %s, "
SLOW = f"cluster={{base: a100-80gb-x8, {LINKS % '1.2'}latency_microseconds: 20}}}}}}"
PINNED = "layout={micro_batch_size: 1, zero_stage: 3, recompute: full}"
SHORT = ("model=qwen2.5-7b", "training.global_batch_size=32", PINNED)


def planned(*overrides: str) -> tuple[Setting, Plan]:
    return make_sized_plan(setting_for(recipe_of("llama2-7b-deepspeed", *SHORT, *overrides)))


def screen(setting: Setting, plan: Plan) -> str:
    return " ".join(check_screen(setting.recipe, plan, Surface(120, False, True)).split())


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The nodes of each layout that is priced for fewer nodes."""
    nodes: list[int] = []

    def judged(setting: Setting, recipe: Recipe, layouts: Sequence[Layout]) -> list[tuple[float, Layout]]:
        nodes.extend(recipe.nodes for _ in layouts)
        return safe_layouts(setting, recipe, layouts)

    monkeypatch.setattr(fewer_and_faster, "safe_layouts", judged)
    return nodes


def test_one_node_is_faster_than_two_behind_a_slow_network_and_the_screen_says_so() -> None:
    setting, plan = planned(SLOW, "nodes=2")
    fewer = plan.faster_on_fewer
    assert fewer is not None
    assert fewer.nodes == 1
    assert fewer.step_seconds == pytest.approx(planned(SLOW, "nodes=1")[1].chosen.step_seconds)
    assert fewer.step_seconds < 0.5 * plan.chosen.step_seconds
    assert "on 1 node: 5.49 s a step in place of 13.07 on 2" in screen(setting, plan)
    assert plan_json(plan)["faster_on_fewer_nodes"]["nodes"] == 1


def test_the_fastest_of_several_is_named_for_a_few_priced_layouts(priced: list[int]) -> None:
    _, plan = planned(SLOW, "nodes=4", "training.global_batch_size=64")
    assert plan.faster_on_fewer is not None
    assert plan.faster_on_fewer.nodes in priced
    assert 1 <= len(priced) <= len(fewer_and_faster.SIZES) * (len(fewer_and_faster.DIVISORS) + 1)


def test_nothing_is_priced_where_computing_decides(priced: list[int]) -> None:
    setting, plan = planned("nodes=2", "training.global_batch_size=256")
    assert plan.faster_on_fewer is None
    assert not priced
    assert "Faster" not in screen(setting, plan)


def test_nothing_is_said_of_nodes_that_a_pin_or_the_memory_forbids() -> None:
    assert planned(SLOW, "nodes=2", "layout.data=16")[1].faster_on_fewer is None
    assert planned(SLOW, "nodes=2", "memory.limit=0.30")[1].faster_on_fewer is None
    assert planned(SLOW, "nodes=1")[1].faster_on_fewer is None
