"""Megatron core 0.16.1 as it is published: its own TransformerConfig, process groups and split of layers take what we
render for 0.16, in the gallery and at random, and every rendered word stands in the list of its parser's flags."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from judges import FRAMEWORKS, TRACED, Say, line_for_line, megatron_python

from llmlaunch.assets import asset
from llmlaunch.errors import UserError
from llmlaunch.frameworks.megatron.backend import MegatronLM
from llmlaunch.frameworks.megatron.parser import core_parser
from llmlaunch.frameworks.megatron.versions import rules_of_version
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.planner.plan import as_planned
from llmlaunch.planner.planning import make_sized_plan
from llmlaunch.planner.setting import setting_of
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe
from support.backend_output import words_of
from support.megatron_cases import Case, cases, refusals, situation
from support.recipes import gallery_of
from support.recorded import recorded, versions
from support.soak import RECORDING, SOAK, share

pytestmark = pytest.mark.frameworks

RECIPES = Path(str(asset("recipes")))
MEGATRON = gallery_of("megatron-lm")

Ask = Callable[[int, list[str]], dict[str, Any]]


@pytest.fixture(scope="module")
def say() -> Iterator[Say]:
    with line_for_line(megatron_python(), TRACED / "core_judge.py") as say:
        yield say


@pytest.fixture(scope="module")
def ask(say: Say) -> Iterator[Ask]:
    """Answers as recorded; in `make soak` the core itself is asked."""
    installed = versions(("megatron-core",), [FRAMEWORKS / "megatron-0.16"])
    with recorded("megatron_core_0_16", installed, live=()) as record:

        def answer(world_size: int, words: list[str]) -> dict[str, Any]:
            question = json.dumps({"world_size": world_size, "arguments": words})
            answered: dict[str, Any] = record.answer(question, lambda: json.loads(say(question)))
            return answered

        yield answer


def at_0_16(recipe: Recipe) -> Recipe:
    return replace(recipe, backend=replace(recipe.backend, version="0.16.1"))


def planned_stages(layout: Layout, layers: int) -> list[list[int]]:
    """Pipeline rank, chunk, first layer and number of layers of every stage, as the plan has them."""
    count = layout.pipeline * layout.virtual_pipeline
    split = layout.layers_by_stage or (layers // count,) * count
    firsts = [0, *accumulate(split)]
    stages = [[n % layout.pipeline, n // layout.pipeline, firsts[n], split[n]] for n in range(count)]
    return sorted(stages)


NEWER = {"gpt-oss-20b": "rope_scaling", "nemotron-3-nano": "mamba", "qwen3-next-80b-a3b": "linear_attention"}


@pytest.mark.parametrize("name", NEWER)
def test_a_recipe_that_0_16_has_no_words_for_is_refused_by_name(name: str) -> None:
    with pytest.raises(UserError, match=rf": model\.{NEWER[name]}: .*0\.16.*; name a newer backend\.version"):
        MegatronLM().rules(at_0_16(load_recipe(RECIPES / f"{name}.yaml", ())))


PLANNED = share(
    [name for name in MEGATRON if name not in NEWER],
    lambda name: RECORDING or name in ("deepseek-v3", "llama3-70b"),
)


@pytest.mark.parametrize("name", PLANNED)
def test_the_gallery_planned_for_0_16_is_taken_by_it(ask: Ask, name: str) -> None:
    setting, plan = make_sized_plan(setting_of(at_0_16(load_recipe(RECIPES / f"{name}.yaml", ())), MegatronLM()))
    recipe = as_planned(setting.recipe, plan.chosen)
    words = words_of(recipe, plan.layout)[1:]
    flags = core_parser("0.16").flags
    assert {word for word in words if word.startswith("--")} <= set(flags)
    theirs = ask(recipe.world_size, words)
    assert theirs["layer"] is None, theirs["error"]
    assert sorted(theirs["stages"]) == planned_stages(plan.layout, recipe.model.num_layers)


if SOAK:  # nobody has recorded what is random

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(case=cases())
    def test_what_our_rules_allow_0_16_takes(say: Say, case: Case) -> None:
        recipe = at_0_16(case.recipe)
        one = situation(recipe, LayoutColumns.of([case.layout]))
        assume(not refusals(replace(case, recipe=recipe)))
        assume(all(rule.allows(one)[0] for rule in rules_of_version(recipe)))
        question = {"world_size": recipe.world_size, "arguments": words_of(recipe, case.layout)[1:]}
        theirs = json.loads(say(json.dumps(question)))
        assert theirs["layer"] is None, theirs["error"]
        assert sorted(theirs["stages"]) == planned_stages(case.layout, recipe.model.num_layers)


@pytest.mark.parametrize(
    ("words", "layer", "said"),
    [
        (["--num-attention-heads", "33"], "transformer config", "must be a multiple of tensor_model_parallel_size"),
        (["--expert-model-parallel-size", "3"], "process groups", "expert_tensor_model_pipeline_parallel"),
        (["--context-parallel-size", "5"], "process groups", "world_size"),
        (["--of-nobody", "3"], "arguments", "SystemExit: 2"),
        (["--recompute-modules", "nothing"], "transformer config", "nothing"),
    ],
)
def test_it_can_say_no(ask: Ask, words: list[str], layer: str, said: str) -> None:
    recipe = at_0_16(load_recipe(RECIPES / "mixtral-8x7b.yaml", ()))
    layout = Layout(2, 4, data=8, expert=8, sequence_parallel=1, zero_stage=1)
    granularity = ["--recompute-granularity", "selective"] if "--recompute-modules" in words else []
    theirs = ask(recipe.world_size, [*words_of(recipe, layout)[1:], *granularity, *words])
    assert (theirs["layer"], said in theirs.get("error", "")) == (layer, True), theirs
