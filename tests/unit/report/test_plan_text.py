"""A plan says under which techniques its figures hold."""

from __future__ import annotations

import re
from itertools import pairwise

from llmlaunch.assets import asset
from llmlaunch.backends.registry import backend_for
from llmlaunch.planner.pareto import pareto
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.setting import setting_of
from llmlaunch.recipe.load import load_recipe
from llmlaunch.report.choices_text import front_text
from llmlaunch.report.plan_text import check_text, plan_text


def said(*overrides: str) -> str:
    recipe = load_recipe(asset("recipes", "llama2-7b-deepspeed.yaml"), overrides)
    return check_text(recipe, make_plan(recipe, backend_for(recipe)))


def test_techniques_stand_in_the_headline() -> None:
    text = said("layout={zero_stage: 3, offload_parameters: true, mlp_chunks: 4}", "training.adapters={rank: 8}")
    assert "  with offload_parameters on, mlp_chunks 4, adapters rank 8 frozen_down off" in text
    assert "\n  with " not in said()


def test_the_refusals_and_the_safe_layouts_add_up_to_what_was_searched() -> None:
    recipe = load_recipe(asset("recipes", "llama3-8b.yaml"))
    plan = make_plan(recipe, backend_for(recipe))
    text = plan_text(recipe, plan)
    head = re.search(r"Searched ([\d,]+) layouts: ([\d,]+) are legal and safe; refused", text)
    assert head is not None
    searched, safe = (int(figure.replace(",", "")) for figure in head.groups())
    counted = re.findall(r"^ +([\d,]+)  ([a-z_-]+): \S", text, flags=re.MULTILINE)
    assert safe + sum(int(count.replace(",", "")) for count, _ in counted) == searched
    assert {key for _, key in counted} == set(plan.refused)


def test_ranked_layouts_say_the_words_that_tell_them_apart() -> None:
    recipe = load_recipe(asset("recipes", "llama3-70b.yaml"))
    plan = make_plan(recipe, backend_for(recipe))
    ranked = [one.describe() for one in (plan.chosen, *plan.alternatives)]
    assert len(set(ranked)) == len(ranked)
    assert all(line in plan_text(recipe, plan) for line in ranked)


def test_a_plan_that_is_not_safe_calls_its_layouts_the_closest() -> None:
    recipe = load_recipe(asset("recipes", "llama3-70b.yaml"), ["model=llama3-405b", "nodes=1"])
    assert "Closest layouts, none of them safe" in plan_text(recipe, make_plan(recipe, backend_for(recipe)))


def test_the_front_is_thinned_for_a_person_and_says_so() -> None:
    recipe = load_recipe(asset("recipes", "llama3-8b.yaml"))
    setting = setting_of(recipe, backend_for(recipe))
    plan, found = make_plan(recipe, setting.backend), setting.search()
    front = [found.at(recipe, int(row)) for row in pareto(found)]
    lines = "\n".join(front_text(plan, front)).split("\n")
    assert lines[0].startswith(f"Pareto front of step time against head-room: {len(front)} safe layouts")
    spare = [float(line.split()[-1]) for line in lines[2:]]
    assert all(b - a > 0.9 for a, b in pairwise(spare[:-1]))
    assert front[-1].describe() in lines[-1]
    assert front_text(plan, []) == ["Pareto front: empty, no layout is safe"]
