"""Which ranks are run alone: the ones that decide, and each that differs from another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llmlaunch.backends.registry import backend_for
from llmlaunch.errors import UserError
from llmlaunch.planner.plan import Plan
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.setting import setting_of
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe
from llmlaunch.rehearsal.ranks import chosen_ranks

RECIPES = Path(__file__).parents[3] / "recipes"
FOUR_STAGES = "layout={tensor: 4, pipeline: 4, virtual_pipeline: 1, context: 1, micro_batch_size: 1}"


def planned(name: str, *overrides: str) -> tuple[Recipe, Plan]:
    recipe = load_recipe(str(RECIPES / f"{name}.yaml"), overrides)
    return recipe, make_plan(setting_of(recipe, backend_for(recipe)))


def numbers(recipe: Recipe, plan: Plan, word: str) -> list[tuple[int, ...]]:
    return [(one.pipeline_rank, *one.stands_for) for one in chosen_ranks(plan, recipe.model, word)]


def test_the_worst_is_the_rank_predicted_to_need_the_most() -> None:
    recipe, plan = planned("llama3-8b", FOUR_STAGES)
    assert numbers(recipe, plan, "worst") == [(0, 0)]


@pytest.mark.parametrize(("share", "ran"), [(0.97, [0, 1]), (0.95, [0, 1]), (0.93, [0])])
def test_a_rank_too_near_the_worst_to_tell_which_is_worse_is_run_too(share: float, ran: list[int]) -> None:
    recipe, plan = planned("llama3-8b", FOUR_STAGES)
    first, second, *others = plan.estimate.ranks
    near = replace(second, device_bytes=round(share * first.device_bytes))
    plan = replace(plan, estimate=replace(plan.estimate, ranks=(first, near, *others)))
    assert [one.pipeline_rank for one in chosen_ranks(plan, recipe.model, "worst")] == ran


def test_all_runs_every_distinct_rank_once() -> None:
    """Of four stages with different numbers of micro-batches in flight none is like another; of those with one, the
    two in the middle are."""
    recipe, plan = planned("llama3-8b", FOUR_STAGES)
    assert numbers(recipe, plan, "all") == [(rank, rank) for rank in range(4)]
    recipe, plan = planned("llama3-8b", FOUR_STAGES, "training.global_batch_size=2")
    assert numbers(recipe, plan, "all") == [(0, 0), (1, 1, 2), (3, 3)]


def test_ranks_whose_experts_lie_elsewhere_are_not_alike() -> None:
    recipe, plan = planned("deepseek-v2-lite", "layout={pipeline: 3, virtual_pipeline: 1, tensor: 1}", "nodes=3")
    groups = chosen_ranks(plan, recipe.model, "all")
    assert sorted(rank for one in groups for rank in one.stands_for) == [0, 1, 2]
    assert all(one.pipeline_rank == one.stands_for[0] for one in groups)


def test_one_rank_is_run_for_those_like_it() -> None:
    recipe, plan = planned("llama3-8b", FOUR_STAGES, "training.global_batch_size=2")
    assert numbers(recipe, plan, "2") == [(2, 1, 2)]


@pytest.mark.parametrize("word", ["4", "-1", "1.5", "first", "", "٣", "9" * 30])
def test_a_rank_that_does_not_exist_is_refused_with_those_that_do(word: str) -> None:
    recipe, plan = planned("llama3-8b", FOUR_STAGES)
    with pytest.raises(UserError, match=r"pipeline ranks are 0 to 3; or say worst or all"):
        chosen_ranks(plan, recipe.model, word)
