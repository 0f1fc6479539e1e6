"""No layout is faster than its arithmetic, so nothing that would do is passed over for being too slow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmlaunch.backends.registry import backend_for
from llmlaunch.planner.search import search
from llmlaunch.planner.setting import setting_of
from llmlaunch.timing.products import least_device_seconds
from support.recipes import recipe_of

CASES = {
    "dense": ("llama3-70b",),
    "small": ("llama3-8b",),
    "experts": ("mixtral-8x7b", "layout={expert_tensor: 1, recompute: none}"),
    "experts with a capacity": (
        "mixtral-8x7b",
        "layout={expert_tensor: 1, recompute: none}",
        "model.moe={num_experts: 8, topk: 2, ffn_hidden_size: 14336, capacity_factor: 0.5}",
    ),
    "data parallel": ("llama2-7b-deepspeed",),
    "adapters": ("llama2-7b-deepspeed", "training.adapters={rank: 8}"),
    "the last layers": ("llama2-7b-deepspeed", "training.trained_layers=2"),
    "rows sampled": ("llama2-7b-deepspeed", "what_if={sampled_share: 0.3}"),
    "long sequences": ("llama3-8b", "training.sequence_length=131072", "training.global_batch_size=16"),
    "another card": ("llama3-70b", "cluster=gb200-nvl72"),
    "a CPU": ("quickstart",),
}


@pytest.mark.parametrize("name_and_overrides", CASES.values(), ids=CASES)
def test_no_layout_beats_the_floor(name_and_overrides: tuple[str, ...]) -> None:
    recipe = recipe_of(*name_and_overrides)
    for nodes in (1, 8):
        setting = setting_of(replace(recipe, nodes=nodes), backend_for(recipe))
        points = search(setting)
        if len(points.points):
            fastest = float(points.step_seconds.min()) * setting.recipe.world_size
            assert fastest >= least_device_seconds(setting.job, recipe.cluster)


def test_the_floor_is_near_enough_to_be_of_use() -> None:
    recipe = recipe_of("llama3-70b")
    setting = setting_of(recipe, backend_for(recipe))
    fastest = float(search(setting).step_seconds.min()) * recipe.world_size
    assert fastest < 2.0 * least_device_seconds(setting.job, recipe.cluster)
