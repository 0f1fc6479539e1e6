"""A measured network decides the layout: the same matrix, slower and faster, makes other plans."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from llmlaunch.cluster.matrix import BandwidthMatrix
from llmlaunch.planner.plan import Plan
from llmlaunch.planner.planning import make_plan
from support.plans import setting_for
from support.recipes import recipe_of

NODES = 16


def plan_on(factor: float) -> Plan:
    """Llama 3 8B on sixteen nodes of four A100, whose links have the statistics of Pipette's published measurements
    (github.com/yimjinkyu1/date2024_pipette, vivaldi-master/time_0.json: 16.2 to 19.8 GB/s), times a factor."""
    chance = random.Random(0)
    speeds = tuple(tuple(factor * chance.uniform(16.2e9, 19.8e9) for _ in range(NODES)) for _ in range(NODES))
    training = ("training.sequence_length=2048", "training.global_batch_size=512")
    recipe = recipe_of("llama3-8b", "cluster=a100-80gb-x8", f"nodes={NODES}", *training)
    matrix = BandwidthMatrix(tuple(f"n{i:02}" for i in range(NODES)), speeds)
    cluster = replace(recipe.cluster, devices_per_node=4, nvlink_domain_devices=4, bandwidth=matrix)
    return make_plan(setting_for(replace(recipe, cluster=cluster, pins={})))


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return [plan_on(factor) for factor in (0.05, 1.0, 8.0)]


def test_a_slow_a_middling_and_a_fast_network_make_three_plans(plans: list[Plan]) -> None:
    assert len({plan.layout for plan in plans}) == 3


def test_a_faster_network_is_never_slower_and_a_slow_one_keeps_data_parallelism_small(plans: list[Plan]) -> None:
    slow, middling, fast = plans
    assert slow.chosen.step_seconds > middling.chosen.step_seconds >= fast.chosen.step_seconds
    assert slow.layout.data < fast.layout.data
