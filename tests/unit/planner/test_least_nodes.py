"""Numbers of devices that are said to hold no layout have no safe one; and where nothing fits, that is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llmlaunch.planner.least_nodes import LeastDevices
from llmlaunch.planner.search import search
from llmlaunch.planner.setting import Setting
from support.plans import gallery_setting

BARE = "memory.limit=0.10"
RECIPES = {
    "dense": ("llama3-8b", "cluster.devices_per_node=2", "training.global_batch_size=24", "model.num_layers=30"),
    "pins": ("llama3-8b", "cluster.devices_per_node=2", "layout={pipeline: [2, 3], micro_batch_size: 2}", BARE),
    "chunks": ("llama3-8b", "cluster.devices_per_node=2", "layout.virtual_pipeline=2", "model.num_layers=24"),
    "layers by stage": ("llama3-8b", "cluster.devices_per_node=2", "layout.layers_by_stage=[10, 12, 10]"),
    "mixture": ("mixtral-8x7b", "cluster.devices_per_node=4", "model.num_layers=8", "layout={tensor: 2, context: 1}"),
    "deepspeed": ("llama2-7b-deepspeed", "cluster.devices_per_node=1", "training.global_batch_size=12"),
}


def on(setting: Setting, nodes: int, limit_bytes: int) -> Setting:
    sized = setting.with_recipe(replace(setting.recipe, nodes=nodes))
    return replace(sized, limit=replace(sized.limit, limit_bytes=limit_bytes))


@pytest.mark.parametrize("overrides", RECIPES.values(), ids=RECIPES)
def test_whatever_the_limit_a_number_without_room_has_no_safe_layout(overrides: tuple[str, ...]) -> None:
    setting, most = gallery_setting(*overrides, "nodes=1"), 3
    decided = 0
    for nodes in (1, 3):
        points = search(on(setting, nodes, setting.limit.limit_bytes), whole=True).points
        if not len(points):
            continue
        fewest = int(points.rows.device_bytes.min())
        for share in (0.3, 1.0):
            sized = on(setting, nodes, round(fewest * share))
            world = sized.recipe.world_size
            holds = LeastDevices(sized, most * setting.recipe.cluster.devices_per_node).may_hold(world)
            assert holds or not np.any(search(sized).safe)
            decided += not holds
    assert decided


def test_no_number_of_devices_holds_a_vocabulary_that_two_ranks_cannot_hold() -> None:
    setting = gallery_setting("llama3-70b", "model.vocab_size=10000000")
    least = LeastDevices(setting, 8192)
    assert not any(least.may_hold(8 * nodes) for nodes in range(1, 1025))


def test_the_fewest_devices_of_ten_thousand_layers_are_known_to_a_few() -> None:
    setting = gallery_setting("llama3-70b", "model.num_layers=10000")
    least = LeastDevices(setting, 8192)
    may = [nodes for nodes in range(1, 400) if least.may_hold(8 * nodes)]
    assert 300 < may[0] <= 327  # which is safe, with 327 ranks


def test_pipelines_that_a_backend_does_not_offer_hold_nothing() -> None:
    setting = gallery_setting("llama2-7b-deepspeed", "memory.limit=0.05")
    least = LeastDevices(setting, 8192)
    assert not any(least.may_hold(8 * nodes) for nodes in range(1, 1025))
