"""The six layouts that qualify a cluster: sized so that four fit, one just fits and one is predicted to die."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, partial

import pytest

from llmlaunch.errors import UserError
from llmlaunch.frameworks.registry import backend_for
from llmlaunch.planner.qualification import DIES, FITS, TIGHT, ChosenTrial, choose_trials
from llmlaunch.planner.setting import Setting, setting_of
from llmlaunch.recipe.types import Recipe
from support.recipes import recipe_of

ON_ONE_NODE = "nodes=1"
IDLE_BYTES = 600 * 2**20


def setting(name: str, own: Sequence[str], words: Sequence[str]) -> Setting:
    recipe = recipe_of(name, *own, *words)
    on_cpu = recipe.cluster.accelerator.kind == "cpu"
    return setting_of(recipe, backend_for(recipe), IDLE_BYTES if on_cpu else None)


@cache
def chosen(name: str, *own: str) -> list[ChosenTrial]:
    return choose_trials(partial(setting, name, own), "qualify-here")


def recipes(name: str, *own: str) -> list[Recipe]:
    return [recipe_of(name, *own, *each.words) for each in chosen(name, *own)]


CASES = [
    ("llama3-8b", ON_ONE_NODE),
    ("mixtral-8x7b", ON_ONE_NODE),
    ("llama2-7b-deepspeed", ON_ONE_NODE),
    ("llama3-8b", ON_ONE_NODE, "cluster.devices_per_node=1"),
    ("llama2-7b-deepspeed", "nodes=2", "cluster=b200-x8"),
    ("quickstart", "cluster.accelerator.memory_gib=2"),
    ("llama3-8b", ON_ONE_NODE, "memory={limit: 1.0, floor_gib: 0}"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case))
def test_four_fit_one_is_tight_and_one_is_predicted_to_die(case: tuple[str, ...]) -> None:
    trials, limit = chosen(*case), setting(case[0], case[1:], ()).limit
    assert [each.trial.expectation for each in trials] == [FITS, FITS, FITS, FITS, TIGHT, DIES]
    *fits, tight, dies = [each.predicted_bytes for each in trials]
    near = min(limit.limit_bytes, 0.97 * limit.memory_bytes)
    assert max(fits) <= near < tight <= limit.memory_bytes
    assert 1.15 <= dies / limit.memory_bytes <= 1.25
    assert len({(each.layout, each.num_layers, each.sequence_length) for each in trials}) == 6


def test_on_eight_gpus_they_differ_in_all_that_the_formula_hangs_on() -> None:
    layouts = [each.layout for each in chosen("llama3-8b", ON_ONE_NODE)]
    for name in ("tensor", "pipeline", "context", "data", "zero_stage", "micro_batch_size", "recompute"):
        assert len({getattr(layout, name) for layout in layouts}) > 1, name
    assert len({each.sequence_length for each in chosen("llama3-8b", ON_ONE_NODE)}) > 1
    stages = {each.layout.zero_stage for each in chosen("llama2-7b-deepspeed", ON_ONE_NODE)}
    assert stages == {0, 1, 2, 3}


def test_a_gpus_model_is_no_deeper_than_its_family() -> None:
    assert max(each.num_layers for each in chosen("llama3-8b", ON_ONE_NODE)) <= 32


def test_a_mixture_has_a_layer_with_experts_and_splits_them() -> None:
    trials = chosen("deepseek-v2-lite", ON_ONE_NODE)  # its first layer is dense
    assert min(each.num_layers for each in trials) >= 2
    assert max(each.layout.expert for each in trials) == 8
    assert max(each.layout.tensor for each in trials) > 1


def test_sequences_stay_within_learned_positions() -> None:
    own = (ON_ONE_NODE, "model=gpt3-125m", "training.sequence_length=2048")
    assert {each.sequence_length for each in chosen("llama2-7b-deepspeed", *own)} <= set(range(2049))


def test_the_runs_are_short_and_end_for_good() -> None:
    saving = ("training.save_interval=5", "training.checkpoint_path=/saves", "restart.times=3", "on_oom=fallback")
    for number, recipe in enumerate(recipes("llama3-8b", "nodes=auto", *saving, "budget.max_nodes=4", ON_ONE_NODE), 1):
        assert recipe.name == f"qualify-here-{number}"
        assert recipe.training.steps == 12
        assert recipe.data.mock
        assert (recipe.restart, recipe.on_oom.layouts, recipe.training.checkpoint_path) == (None, 0, None)
        assert recipe.slurm["no-requeue"] is True
        assert 10 <= int(str(recipe.slurm["time"])) <= 30


def test_techniques_of_the_recipe_that_are_not_searched_stay() -> None:
    own = (ON_ONE_NODE, "layout={tensor: 8, loss: native, recompute: full}")
    for each, recipe in zip(chosen("llama3-8b", *own), recipes("llama3-8b", *own), strict=True):
        assert recipe.techniques.loss == "native"
        assert recipe.pins["tensor"] == each.layout.tensor


def test_a_model_that_fills_a_card_with_one_layer_is_refused_with_a_reason() -> None:
    own = ("model=llama3-405b", "cluster={base: a100-40gb-x8, devices_per_node: 1}", ON_ONE_NODE)
    with pytest.raises(UserError, match=re.escape("predicted to fit")) as refused:
        chosen("llama3-8b", *own)
    assert "llama3-405b" in str(refused.value)
    assert "--model" in str(refused.value)
