"""AMD's GPUs are planned and priced, and refused by name where a job would be written."""

from __future__ import annotations

from typing import Any

import pytest

from llmlaunch.errors import UserError
from llmlaunch.frameworks.framework import backend_for
from llmlaunch.planner.planning import make_plan
from support.plans import setting_for
from support.recipes import recipe_of

CARDS = ("mi300x", "mi325x", "mi355x")


@pytest.mark.parametrize("name", ["llama3-8b", "qwen2.5-7b-deepspeed"])
def test_an_amd_machine_is_priced_and_not_rendered(name: str) -> None:
    plans = [make_plan(setting_for(recipe_of(name, f"cluster={card}-x8", "nodes=2"))) for card in CARDS]
    assert all(plan.safe and plan.chosen.step_seconds > 0 for plan in plans)
    seconds = [plan.chosen.step_seconds for plan in plans]
    assert seconds[2] < seconds[1] <= seconds[0] * 1.001  # CDNA 4 multiplies twice as fast; the MI325X as the MI300X
    assert all("no job of llmlaunch has run on an AMD GPU" in plan.unrendered[0] for plan in plans)
    recipe = recipe_of(name, "cluster=mi300x-x8", "nodes=2")
    with pytest.raises(UserError, match=r"cluster\.accelerator: no job of llmlaunch has run on an AMD GPU"):
        backend_for(recipe).render(recipe, plans[0].layout)


@pytest.mark.parametrize(
    ("cluster", "numbers", "priced"),
    [
        ("mi300x-x8", "fp8: tensorwise", True),
        ("mi300x-x8", "fp8: mxfp8", False),
        ("mi355x-x8", "fp8: mxfp8", True),
        ("mi355x-x8", "fp4: nvfp4", False),
    ],
)
def test_narrow_products_are_those_of_the_card(cluster: str, numbers: str, priced: bool) -> None:
    key, value = numbers.split(": ")
    recipe = recipe_of("llama3-8b", f"cluster={cluster}", "nodes=2", f"training.{key}={value}")
    if priced:
        assert backend_for(recipe).rules(recipe)
    else:
        with pytest.raises(UserError, match=f"training.{key}"):
            backend_for(recipe).rules(recipe)


def test_nothing_that_only_nvidias_cards_have_is_offered() -> None:
    mixture = recipe_of(
        "mixtral-8x7b", "cluster=mi300x-x8", "backend={name: megatron-lm, libraries: [deepep, hybridep]}"
    )
    dense: Any = recipe_of("llama3-70b", "cluster=mi300x-x8")
    spaces = [backend_for(recipe).space(recipe) for recipe in (mixture, dense)]
    assert spaces[0].libraries == ()
    tried = [techniques for space in spaces for techniques in space.step_techniques]
    assert not any(t.tp_comm_overlap or t.token_dispatcher == "flex" for t in tried)
