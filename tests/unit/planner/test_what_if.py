"""A plan says of each what-if what it costs and what it gains; MEMO's share follows from link and host memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmlaunch.cluster.profile import HostLink
from llmlaunch.planner.plan_json import plan_json
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.setting import Setting, setting_of
from llmlaunch.planner.what_if import swapped_share_of, with_solved_share
from llmlaunch.report.plan_text import check_text
from llmlaunch.techniques.what_ifs import SOLVED_SHARE
from support.plans import plan_of, setting_for
from support.recipes import recipe_of

PINNED = "layout={tensor: 4, pipeline: 1, context: 1, micro_batch_size: 1, recompute: none, offload_modules: []}"
AUTO = "what_if={swapped_share: auto}"
DEEP = "layout={tensor: 2, pipeline: 8, virtual_pipeline: 1, micro_batch_size: 1, recompute: none, offload_modules: []}"


def swapping(length: int, *overrides: str) -> Setting:
    return setting_for(recipe_of("llama3-8b", PINNED, AUTO, f"training.sequence_length={length}", *overrides))


def test_a_plan_shows_both_sides_of_two_versions_of_the_weights() -> None:
    few = "training.global_batch_size=64"
    plain, twice = plan_of("llama3-8b", DEEP, few), plan_of("llama3-8b", DEEP, few, "what_if={weight_versions: 2}")
    (versions,) = twice.what_ifs
    assert plain.what_ifs == ()
    assert versions.device_bytes == twice.estimate.worst.device_bytes - plain.estimate.worst.device_bytes > 0
    assert versions.step_seconds == pytest.approx(twice.chosen.step_seconds - plain.chosen.step_seconds)
    assert versions.step_seconds < 0
    assert plan_json(twice)["what_ifs"] == [versions.as_json()]
    assert f"What if {versions.sentence}" in check_text(recipe_of("llama3-8b"), twice)
    assert "more on the fullest device" in versions.sentence
    assert "s less a step" in versions.sentence


@pytest.mark.parametrize(("length", "least", "most"), [(2048, 0.0, 0.5), (131072, 0.5, 0.8), (1048576, 0.99, 1.0)])
def test_what_the_link_carries_grows_with_the_sequence(length: int, least: float, most: float) -> None:
    setting = swapping(length, "cluster={base: h100-80gb-x8, host_memory_gib: 1000000}")
    assert setting.recipe.techniques.swapped_share == SOLVED_SHARE
    assert least < with_solved_share(setting).recipe.techniques.swapped_share <= most


def test_a_faster_link_swaps_more_and_recomputes_less() -> None:
    slow = swapping(32768)
    device = slow.recipe.cluster.accelerator
    fast_device = replace(device, host_link=HostLink("a faster link", 225e9, 200e9))
    fast = setting_of(replace(slow.recipe, cluster=replace(slow.recipe.cluster, accelerator=fast_device)), slow.backend)
    plans = [make_plan(setting) for setting in (slow, fast)]
    shares = [plan.chosen.techniques.swapped_share for plan in plans]
    assert shares[0] < shares[1]
    assert plans[0].step_terms["recompute"] > plans[1].step_terms["recompute"]
    assert plans[0].estimate.worst.device_bytes == plans[1].estimate.worst.device_bytes
    assert all("it is hidden" in plan.assumptions[-1] for plan in plans)


def test_a_small_host_swaps_no_more_than_it_holds() -> None:
    roomy, small = (
        swapping(131072, f"cluster={{base: h100-80gb-x8, host_memory_gib: {gib}}}") for gib in (100000, 400)
    )
    plan = make_plan(small)
    assert plan.host_limit is not None
    assert plan.chosen.techniques.swapped_share < make_plan(roomy).chosen.techniques.swapped_share
    assert (plan.estimate.host_bytes_per_node or 0) <= plan.host_limit.limit_bytes
    share = swapped_share_of(with_solved_share(small), plan.layout)
    assert share == pytest.approx(plan.chosen.techniques.swapped_share)


def test_a_plan_with_graphs_says_that_no_run_measured_them() -> None:
    graphed = plan_of("llama3-8b", "layout.cuda_graphs=[full_iteration]")
    assert "no measured run stands behind it" in graphed.assumptions[-1]
    assert graphed.chosen.step_seconds < plan_of("llama3-8b", "layout.cuda_graphs=[]").chosen.step_seconds
