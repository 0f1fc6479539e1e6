"""Each neighbour is the chosen layout with one choice changed; what it costs is what a plan of it would show."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from llmlaunch.planner.changes import judge_layouts as judged_alone
from llmlaunch.planner.neighbours import Neighbour, neighbours
from llmlaunch.planner.plan import Candidate, as_planned
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.search import search
from llmlaunch.planner.search_space import SPLIT_FIELDS
from llmlaunch.planner.setting import Setting, setting_of
from llmlaunch.techniques import NO_TECHNIQUES, SWITCH_NAMES
from support.plans import gallery_setting
from support.soak import share

AMOUNTS = ("recompute_layers", "offload_layers", "layers_by_stage")
OFFLOADS = ("offload_modules", "offload_checkpoints", "offload_optimizer", "offload_parameters")
RECIPES = {
    "llama3-8b": ("layout.layers_by_stage=even",),
    "mixtral-8x7b": ("layout.layers_by_stage=even",),
    "llama2-7b-deepspeed": (),
}


@cache
def chosen_and_near(name: str, *overrides: str) -> tuple[Setting, Candidate, list[Neighbour]]:
    setting = gallery_setting(name, *overrides)
    chosen = make_plan(setting).chosen
    planned = setting.with_recipe(as_planned(setting.recipe, chosen))
    return planned, chosen, neighbours(planned, chosen.layout)


@pytest.mark.parametrize("name", share(RECIPES, ["mixtral-8x7b"]))
def test_one_choice_differs_data_takes_up_the_change_and_the_world_size_stays(name: str) -> None:
    setting, chosen, near = chosen_and_near(name, *RECIPES[name])
    assert near
    here = chosen.layout.as_json()
    for neighbour in near:
        there = neighbour.verdict.layout.as_json()
        assert neighbour.verdict.layout.world_size == setting.recipe.world_size
        assert neighbour.before != neighbour.after
        differ = {key for key in there if there[key] != here[key]} - {"data", "layers_by_stage"}
        if neighbour.name in SPLIT_FIELDS:
            assert differ == {neighbour.name} | set(neighbour.along) - set(SWITCH_NAMES)
        else:
            assert differ <= {"zero_stage", "recompute", "recompute_layers", "offload_layers"}


@pytest.mark.parametrize("name", share(RECIPES, ["mixtral-8x7b"]))
def test_a_neighbour_in_size_costs_and_fails_as_a_search_pinned_to_it_says(name: str) -> None:
    setting, _, near = chosen_and_near(name, *RECIPES[name])
    for neighbour in near:
        if neighbour.name not in SPLIT_FIELDS:
            continue
        layout = neighbour.verdict.layout
        pins: dict[str, Any] = {n: v for n, v in layout.as_json().items() if n not in AMOUNTS}
        pins["offload_layers"] = layout.offload_layers
        pins |= {"recompute_layers": layout.recompute_layers} if layout.recompute_layers else {}
        fixed = ("recompute_modules", "recompute_method", "gradient_dtype", *OFFLOADS, *SWITCH_NAMES)
        switches: dict[str, Any] = {n: v for n, v in neighbour.along.items() if n in SWITCH_NAMES}
        techniques = replace(setting.recipe.techniques, **switches)
        recipe = replace(setting.recipe, pins=pins, fixed=fixed, techniques=techniques)
        result = search(setting.with_recipe(recipe), whole=True)
        assert result.searched == 1
        if not neighbour.verdict.legal:
            assert neighbour.verdict.refusal is not None
            assert dict(result.refused) == {neighbour.verdict.refusal.key: 1}
            continue
        assert result.device_bytes[0] == pytest.approx(neighbour.verdict.device_bytes, abs=1)
        assert result.step_seconds[0] == pytest.approx(neighbour.verdict.step_seconds)
        assert bool(result.safe[0]) == (neighbour.verdict.refusal is None)


def test_a_neighbour_in_words_is_the_best_of_the_layouts_that_differ_in_that_choice_alone() -> None:
    setting, chosen, near = chosen_and_near("llama2-7b-deepspeed")
    result = search(setting_of(replace(setting.recipe, techniques=NO_TECHNIQUES), setting.backend), whole=True)
    every = [result.at(setting.recipe, i) for i in range(len(result.points))]
    for neighbour in near:
        if neighbour.name == "zero_stage":
            same = [c for c in every if c.layout == neighbour.verdict.layout and c.techniques == chosen.techniques]
            assert [c.device_bytes for c in same] == [neighbour.verdict.device_bytes]
            assert same[0].step_seconds == pytest.approx(neighbour.verdict.step_seconds)
    assert {neighbour.after for neighbour in near if neighbour.name == "zero_stage"} == {0, 1, 2, 3} - {
        chosen.layout.zero_stage
    }
    assert {neighbour.after for neighbour in near if neighbour.name == "recompute"} == {"full"}


def test_the_next_value_down_and_up_is_asked_about() -> None:
    _, chosen, near = chosen_and_near("llama3-70b", "layout.techniques=asked")
    values: dict[str, list[object]] = {}
    for neighbour in near:
        values.setdefault(neighbour.name, []).append(neighbour.after)
    assert values["tensor"] == [chosen.layout.tensor // 2, chosen.layout.tensor * 2]
    assert values["pipeline"] == [chosen.layout.pipeline // 2, chosen.layout.pipeline * 2]
    assert values["micro_batch_size"][-1] == 2 * chosen.layout.micro_batch_size
    assert values["sequence_parallel"] == [False]
    assert "bf16" in values["gradient_dtype"]


def test_sequence_parallelism_goes_with_tensor_parallelism_instead_of_refusing_the_neighbour() -> None:
    _, chosen, near = chosen_and_near("llama3-8b", "layout={tensor: 2, sequence_parallel: true, micro_batch_size: 1}")
    assert chosen.layout.sequence_parallel
    alone = next(neighbour for neighbour in near if neighbour.name == "tensor" and neighbour.after == 1)
    assert alone.along == {"sequence_parallel": False, "tp_comm_overlap": False}
    assert alone.verdict.legal


def test_a_refused_neighbour_names_the_rule_that_stays_broken_when_all_that_can_has_given_way() -> None:
    overrides = ("nodes=6", "training.global_batch_size=96", "layout={tensor: 2, pipeline: 4}")
    _, chosen, near = chosen_and_near("mixtral-8x7b", *overrides)
    refused = next(neighbour for neighbour in near if neighbour.name == "pipeline" and neighbour.after == 8)
    assert chosen.layout.virtual_pipeline > 4  # 32 layers are no whole number of so many chunks on 8 ranks
    assert refused.along == {"virtual_pipeline": 4}
    assert refused.verdict.refusal is not None
    assert refused.verdict.refusal.key == "expert-world"


def test_a_neighbour_beyond_the_limit_says_by_how_much_on_which_rank_and_of_what() -> None:
    setting, _, near = chosen_and_near("llama3-70b", "layout={recompute: none, tensor: 4, pipeline: 4}")
    over = next(neighbour for neighbour in near if neighbour.name == "micro_batch_size" and neighbour.verdict.refusal)
    assert over.verdict.refusal is not None
    assert over.verdict.refusal.key == "memory"
    too_much = ((over.verdict.device_bytes or 0) - setting.limit.limit_bytes) / 2**30
    reason = over.verdict.refusal.reason
    assert reason.startswith(f"needs {too_much:.1f} GiB more than the limit on pipeline rank 0, most of it activations")


def test_where_the_planner_chose_how_many_layers_to_recompute_each_neighbour_gets_what_it_needs() -> None:
    overrides = ("layout={recompute: full, recompute_method: block, tensor: 4, pipeline: 4, context: 1}", "nodes=2")
    setting, chosen, near = chosen_and_near("llama3-70b", *overrides)
    assert chosen.layout.recompute_layers
    needs = [
        neighbour.verdict
        for neighbour in near
        if neighbour.name in SPLIT_FIELDS and neighbour.verdict.layout.recompute_layers
    ]
    assert len({judged.layout.recompute_layers for judged in needs}) > 1
    for judged in needs:
        fewer = replace(judged.layout, recompute_layers=judged.layout.recompute_layers - 1)
        if judged.refusal is None and fewer.recompute_layers:
            assert judged_alone(setting, [fewer])[0].refusal is not None
