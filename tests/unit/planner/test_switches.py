"""What a search turns on by itself: what keeps the mathematics, only where it gains, and never against the recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llmlaunch.frameworks.base import StateTechniques, StepTechniques
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.planner.changes import judge_layouts, rules_failed
from llmlaunch.planner.plan import Plan, as_planned
from llmlaunch.planner.pricing import price_all
from llmlaunch.planner.search_space import (
    enumerate_splits,
    recipe_with_techniques,
    switches_matter,
    technique_space,
)
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import CHOOSABLE, NO_TECHNIQUES, SPARING_SWITCHES, SWITCH_NAMES, Techniques
from llmlaunch.techniques.technique import declarations, parameter_owners
from support.plans import plan_of, setting_for
from support.recipes import recipe_of
from support.soak import share

CHANGES_ROUNDING = {name for name, each in declarations(Techniques).items() if each.rounding is not None}
LEAST_GAIN = 0.019  # 2 % of a step, of which the other habits of the same layout take a little
BIT_EQUAL_KEY, ASKED_KEY = "layout.techniques=bit-equal", "layout.techniques=asked"
CHOOSING = ("llama3-70b", "qwen3-30b-a3b", "mistral-7b", "llama3.1-8b-ulysses")


def tried(recipe: Recipe) -> Iterator[Techniques]:
    """All techniques that are searched for a recipe."""
    setting = setting_for(recipe)
    space = technique_space(recipe, setting.backend)
    for step in space.step:
        for state in space.state:
            yield recipe_with_techniques(recipe, step, state).techniques


def turned_on(techniques: Techniques) -> list[str]:
    on = [name for name in SWITCH_NAMES if getattr(techniques, name) != getattr(NO_TECHNIQUES, name)]
    return [name for name in on if parameter_owners(Techniques).get(name) not in on]


def test_every_technique_a_search_may_choose_is_bit_equal_or_not_with_a_reason() -> None:
    for name, each in declarations(Techniques).items():
        assert [each.bit_equal, each.rounding].count(None) == (1 if name in CHOOSABLE else 2), name


def test_a_search_chooses_what_step_and_state_techniques_hold() -> None:
    assert {*declarations(StepTechniques), *declarations(StateTechniques)} == set(CHOOSABLE)


@pytest.mark.parametrize("name", share(CHOOSING[:2], CHOOSING[1:2]))
def test_a_plan_turns_on_only_what_gains(name: str) -> None:
    plan = plan_of(name)
    assert turned_on(plan.chosen.techniques)
    for switch, seconds in without_each(name, plan):
        gain = 1.0 - plan.chosen.step_seconds / seconds
        assert gain >= LEAST_GAIN, switch


def without_each(name: str, plan: Plan) -> Iterator[tuple[str, float]]:
    """The step's seconds of the same layout without each switch, infinite where it is not safe then."""
    for switch in turned_on(plan.chosen.techniques):
        off: dict[str, Any] = {switch: getattr(NO_TECHNIQUES, switch)}
        recipe = as_planned(recipe_of(name), plan.chosen)
        without = replace(recipe, techniques=replace(recipe.techniques, **off))
        (verdict,) = judge_layouts(setting_for(without), [plan.layout])
        assert verdict.step_seconds is not None
        yield switch, verdict.step_seconds if verdict.refusal is None else np.inf


@pytest.mark.parametrize("name", CHOOSING[:3])
def test_bit_equal_leaves_out_what_changes_a_rounding(name: str) -> None:
    changing = {t for each in tried(recipe_of(name)) for t in CHANGES_ROUNDING if is_on(each, t)}
    assert changing
    assert not {t for each in tried(recipe_of(name, BIT_EQUAL_KEY)) for t in CHANGES_ROUNDING if is_on(each, t)}
    assert any(each.offload_modules or each.offload_checkpoints for each in tried(recipe_of(name, BIT_EQUAL_KEY)))


def is_on(techniques: Techniques, name: str) -> bool:
    return bool(getattr(techniques, name) != getattr(NO_TECHNIQUES, name))


def test_a_switch_the_recipe_asks_for_is_held_under_every_limit() -> None:
    for limit in (BIT_EQUAL_KEY, ASKED_KEY):
        assert {each.loss for each in tried(recipe_of("llama3-8b", limit, "layout.loss=native"))} == {"native"}
        assert {each.loss for each in tried(recipe_of("llama3-8b", limit))} == {None}


def test_asked_turns_on_nothing_else_and_still_recomputes_and_offloads() -> None:
    choices = list(tried(recipe_of("mixtral-8x7b", ASKED_KEY)))
    assert not {name for each in choices for name in turned_on(each)}
    assert any(each.recompute_modules for each in choices)
    assert any(each.offload_optimizer for each in choices)


@pytest.mark.parametrize(
    ("name", "pin", "field", "value"),
    [
        ("llama3-70b", "layout.tp_comm_overlap=false", "tp_comm_overlap", False),
        ("mistral-7b", "layout.loss=none", "loss", None),
        ("llama3.1-8b-128k", "layout.context_comm=p2p", "context_comm", "p2p"),
        ("mixtral-8x7b", "layout.overlap_expert_communication=false", "overlap_expert_communication", False),
        ("mistral-7b", "layout.mlp_chunks=1", "mlp_chunks", 1),
        ("qwen3-30b-a3b", "layout.cuda_graphs=[]", "cuda_graphs", ()),
    ],
)
def test_a_switch_the_recipe_turns_off_stays_off(name: str, pin: str, field: str, value: object) -> None:
    assert len({getattr(each, field) for each in tried(recipe_of(name))}) > 1
    assert {getattr(each, field) for each in tried(recipe_of(name, pin))} == {value}


@pytest.mark.parametrize(
    ("name", "recipe", "overrides"),
    [
        ("tp_comm_overlap", "llama3.1-8b-a100-40gb", ()),  # no multicast before Hopper
        ("tp_comm_overlap", "deepseek-v3", ()),  # no user buffers for latent attention
        ("loss", "llama3-8b", ("training.precision=fp16",)),  # its gradients are bf16
        ("loss", "llama3-70b", ()),  # whose loss takes too little of a step
        ("cuda_graphs", "llama3-8b", ()),  # whose kernels are long
        ("mlp_chunks", "llama3-8b", ("backend={name: megatron-lm, version: '0.16'}",)),
        ("overlap_expert_communication", "mixtral-8x7b", ("training.precision=fp32",)),
    ],
)
def test_what_device_model_or_version_cannot_do_is_not_tried(
    name: str, recipe: str, overrides: tuple[str, ...]
) -> None:
    assert not any(is_on(each, name) for each in tried(recipe_of(recipe, *overrides)))


LIBRARIES = "backend={name: megatron-lm, libraries: [deepep, hybridep]}"
HYBRIDEP = "backend={name: megatron-lm, libraries: [hybridep]}"


@pytest.mark.parametrize(
    ("overrides", "libraries"),
    [
        ((), set()),
        ((LIBRARIES,), {"deepep"}),
        ((HYBRIDEP,), {"hybridep"}),
        ((LIBRARIES, "cluster=a100-80gb-x8"), {"deepep"}),
        ((HYBRIDEP, "cluster=a100-80gb-x8"), set()),
        ((LIBRARIES, "cluster=gb200-nvl72", "nodes=16"), {"hybridep"}),
        ((LIBRARIES, "layout.token_dispatcher=alltoall"), set()),
        ((LIBRARIES, BIT_EQUAL_KEY), set()),
    ],
)
def test_a_library_is_used_only_where_the_recipe_says_it_is_there(
    overrides: tuple[str, ...], libraries: set[str]
) -> None:
    choices = list(tried(recipe_of("mixtral-8x7b", *overrides)))
    assert {each.flex_backend for each in choices} - {None} == libraries
    assert {each.flex_backend for each in choices if each.token_dispatcher != "flex"} <= {None}


def test_weight_gradients_wait_and_a_shared_expert_runs_beside_the_exchange_where_either_can_gain() -> None:
    mixed = list(tried(recipe_of("deepseek-v2-lite")))
    assert any(each.overlap_shared_expert for each in mixed)
    assert any(each.delay_weight_gradients for each in mixed)
    assert all(each.overlap_expert_communication for each in mixed if each.delay_weight_gradients)
    assert not any(each.overlap_expert_communication for each in mixed if each.overlap_shared_expert)
    assert not any(each.overlap_shared_expert for each in tried(recipe_of("mixtral-8x7b")))


def test_a_switch_is_not_tried_where_it_changes_nothing() -> None:
    layouts = LayoutColumns.of([Layout(data=8), Layout(tensor=2, data=4), Layout(context=2, data=4)])
    assert list(switches_matter(("tp_comm_overlap",), layouts)) == [False, True, False]
    assert list(switches_matter(("context_comm", "loss"), layouts)) == [False, False, True]


UNVERIFIED = "nobody has published a run with these together on such a card"


@pytest.mark.parametrize(
    ("overrides", "unverified"),
    [
        (("layout.token_dispatcher=alltoall", "layout.overlap_expert_communication=false"), False),
        (("layout.token_dispatcher=flex", "layout.overlap_expert_communication=true"), False),
        (("layout.token_dispatcher=flex", "layout.overlap_expert_communication=true", "cluster=a100-80gb-x8"), True),
    ],
)
def test_a_plan_says_when_nobody_has_run_its_switches_together(overrides: tuple[str, ...], unverified: bool) -> None:
    sizes = ("nodes=2", "layout.tensor=1", "layout.pipeline=1", "layout.expert=16", "layout.cuda_graphs=[]")
    plan = plan_of("qwen3-30b-a3b", *sizes, *overrides)
    assert any(UNVERIFIED in assumption for assumption in plan.assumptions) == unverified


@pytest.mark.parametrize("name", share([*CHOOSING[:2], "deepseek-v2-lite"], CHOOSING[1:2]))
def test_a_switch_that_only_makes_a_step_faster_needs_no_less_memory(name: str) -> None:
    """So a search that finds nothing safe need not price the others."""
    setting = setting_for(recipe_of(name))
    recipe, space = setting.recipe, technique_space(setting.recipe, setting.backend)
    splits = enumerate_splits(recipe, setting.backend.space(recipe))
    rules = setting.backend.rules(recipe)
    splits = splits.take(np.flatnonzero(~rules_failed(recipe, splits, rules).any(axis=0)))
    splits = splits.take(np.arange(0, len(splits), 1 + len(splits) // 24))
    points = price_all(setting, splits, space, [rule for rule in rules if rule.of_techniques])
    sparing, least = set(space.sparing_steps), {}
    for row in range(len(points)):
        step, state = points.techniques(row)
        key = int(points.rows.split[row]), replace(step, **without_speed(step)), state
        is_sparing = int(points.rows.step_techniques[row]) in sparing
        bytes_of = float(points.rows.device_bytes[row]), float(points.rows.host_bytes[row])
        if is_sparing and step.solved is None:
            least[key] = bytes_of
    compared = 0
    for row in range(len(points)):
        step, state = points.techniques(row)
        key = int(points.rows.split[row]), replace(step, **without_speed(step)), state
        if int(points.rows.step_techniques[row]) not in sparing and key in least:
            compared += 1
            assert points.rows.device_bytes[row] >= least[key][0], step
            assert points.rows.host_bytes[row] >= least[key][1], step
    assert compared


def without_speed(step: StepTechniques) -> dict[str, Any]:
    return {name: getattr(NO_TECHNIQUES, name) for name in SWITCH_NAMES if name not in SPARING_SWITCHES}
