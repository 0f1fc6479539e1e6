"""Megatron-FSDP is planned only where a recipe pins ZeRO stage 2 or 3, and rendered as its parser wants it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmlaunch.errors import UserError
from llmlaunch.frameworks.base import Rendered
from llmlaunch.frameworks.framework import framework_of
from llmlaunch.frameworks.megatron.backend import MegatronLM
from llmlaunch.frameworks.resharding import reshards
from llmlaunch.layers.parameters import count_parameters
from llmlaunch.layout import Layout
from llmlaunch.memory.estimator import estimate
from llmlaunch.planner.neighbours import technique_neighbours
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.setting import setting_of
from support.recipes import recipe_of

SAVING = ("training.save_interval=100", "training.checkpoint_path=/ckpt")
GPT3 = ("model=gpt3-175b", "training.sequence_length=2048")
PINNED = "layout.zero_stage=3"
THIRD = Layout(data=32, zero_stage=3)


def rendered(layout: Layout, *overrides: str) -> Rendered:
    return MegatronLM().render(recipe_of("llama3-8b", f"layout.zero_stage={layout.zero_stage}", *overrides), layout)


def test_learned_positions_are_placed_whole() -> None:
    assert MegatronLM().facts(recipe_of("llama3-8b", PINNED, *GPT3)).states.placed_whole
    assert not MegatronLM().facts(recipe_of("llama3-8b", PINNED)).states.placed_whole


def test_several_connections_even_with_tensor_parallelism() -> None:
    split = Layout(2, data=16, sequence_parallel=1, zero_stage=3)
    assert rendered(split).environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    chosen = rendered(split, "environment={CUDA_DEVICE_MAX_CONNECTIONS: '32'}")
    assert chosen.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    with pytest.raises(UserError, match="CUDA_DEVICE_MAX_CONNECTIONS: is '1', and with zero_stage 2 or 3"):
        rendered(split, "environment={CUDA_DEVICE_MAX_CONNECTIONS: '1'}")


def test_a_checkpoint_loads_on_another_number_of_ranks_but_not_cut_otherwise() -> None:
    recipe = recipe_of("llama3-8b", PINNED, *SAVING)
    assert reshards(recipe, THIRD, replace(THIRD, data=16, context=2))
    assert not reshards(recipe, THIRD, replace(THIRD, data=16, tensor=2))
    assert not reshards(recipe, THIRD, replace(THIRD, zero_stage=2))


def test_in_fp32_only_checkpoints_of_a_gated_model_are_refused() -> None:
    fp32 = ("llama3-8b", PINNED, "training.precision=fp32")
    assert MegatronLM().rules(recipe_of(*fp32))
    assert MegatronLM().rules(recipe_of(*fp32, *SAVING, *GPT3))


def test_only_a_recipe_that_pins_it_gets_it() -> None:
    free = recipe_of("llama3-8b")
    assert make_plan(setting_of(free, MegatronLM())).layout.zero_stage <= 1
    assert framework_of(free).recorded_name(free) == "megatron-lm"
    pinned = recipe_of("llama3-8b", "layout.zero_stage=[2, 3]")
    plan = make_plan(setting_of(pinned, MegatronLM()))
    assert plan.layout.zero_stage >= 2
    assert plan.layout.pipeline == 1
    assert framework_of(pinned).recorded_name(pinned) == "megatron-fsdp"


def test_its_neighbours_are_of_the_same_implementation() -> None:
    setting = setting_of(recipe_of("llama3-8b", PINNED), MegatronLM())
    neighbours = list(technique_neighbours(setting, make_plan(setting).layout))
    assert {each.verdict.layout.zero_stage for each in neighbours} == {2, 3}
    assert [each.verdict.layout.zero_stage for each in neighbours if each.name == "zero_stage"] == [2]


def test_stage_3_shards_the_parameters_and_stage_2_keeps_them_whole() -> None:
    setting = setting_of(recipe_of("llama3-8b", "layout.zero_stage=[2, 3]"), MegatronLM())
    third, second = (estimate(setting.job, replace(THIRD, zero_stage=n)).ranks[0].terms for n in (3, 2))
    parameters = count_parameters(setting.recipe.model).total
    assert second["parameters"] == pytest.approx(2 * parameters, rel=0.01)
    assert third["parameters"] == pytest.approx(2 * parameters / 32, rel=0.01)
    assert second["gradients"] == third["gradients"]
