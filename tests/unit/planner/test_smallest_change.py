"""The change named as the smallest makes the recipe safe, and nothing smaller does."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from math import log2
from typing import Any

import numpy as np
import pytest

from llmlaunch.errors import UserError
from llmlaunch.layout import RECOMPUTE_NAMES
from llmlaunch.planner.plan_json import plan_json
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.search import search
from llmlaunch.planner.search_space import Change, offered_values, yaml_text
from llmlaunch.planner.setting import Setting
from llmlaunch.planner.smallest_change import find_advice
from support.plans import gallery_setting, plan_of, setting_for
from support.soak import SOAK, share

SMALL = ("cluster=a100-40gb-x8", "nodes=1", "training.global_batch_size=32")
SEEDS = range(200) if SOAK else (0, 5)  # of pins that are quickly tried
SHARE_PINNED = 0.4
FEW_WORDS = {"offload_optimizer": 0.0, "offload_layers": 0, "offload_modules": [], "layers_by_stage": "even"}
PINS: dict[str, tuple[Any, ...]] = {
    "tensor": (1, 2, 4),
    "pipeline": (1, 2, 4),
    "data": (1, 2, 4),
    "micro_batch_size": (1, 2, 4, 8),
    "virtual_pipeline": (1, 2),
    "sequence_parallel": (False, True),
    "zero_stage": (0, 1),
    "recompute": RECOMPUTE_NAMES,
}


def safe(setting: Setting, pins: dict[str, Any]) -> bool:
    return bool(np.any(search(setting.with_recipe(replace(setting.recipe, pins=pins))).safe))


def overrides_of(changes: dict[str, Any]) -> list[str]:
    return [f"{key}={yaml_text(value)}" for key, value in changes.items()]


def unsafe_pins(seed: int) -> tuple[dict[str, Any], tuple[str, ...], Change]:
    """Return random pins that no safe layout has, the overrides that write them, and the change of pins that is
    advised. A word that the recipe says comes before two pins, so that is another test's."""
    chance = random.Random(seed)
    while True:
        pins = {name: chance.choice(values) for name, values in PINS.items() if chance.random() < SHARE_PINNED}
        pinned = (f"{name}: {yaml_text(value)}" for name, value in {**pins, **FEW_WORDS}.items())
        few = ("cluster.devices_per_node=4", "model.num_layers=16", "memory.limit=0.6")
        overrides = (*SMALL, *few, f"layout={{{', '.join(pinned)}}}")
        try:
            here = gallery_setting("llama3-8b", *overrides)
        except UserError:
            continue  # what no layout could pass is refused before anything is searched
        if not np.any(search(here).safe):
            change = find_advice(here).change
            assert change is not None
            if {key.removeprefix("layout.") for key in change.settings} <= set(pins):
                return pins, overrides, change


@pytest.mark.parametrize("seed", SEEDS)
def test_the_named_change_of_pins_is_safe_when_it_is_applied_and_none_smaller_is(seed: int) -> None:
    pins, overrides, change = unsafe_pins(seed)
    plan = plan_of("llama3-8b", *overrides, *overrides_of(dict(change.settings)))
    assert plan.safe
    assert plan.layout == change.layout
    named, here = {key.removeprefix("layout.") for key in change.settings}, gallery_setting("llama3-8b", *overrides)
    best = nearest_by_trying(here, len(named))
    assert best == pytest.approx(sum(away(name, getattr(change.layout, name), pins[name]) for name in named))
    for fewer in range(1, len(named)):
        assert nearest_by_trying(here, fewer) is None


def away(name: str, value: int, pin: Any) -> float:
    number = RECOMPUTE_NAMES.index(pin) if name == "recompute" else int(pin)
    kinds = ("sequence_parallel", "zero_stage", "recompute")
    return float(abs(value - number)) if name in kinds else abs(log2(value) - log2(number))


def nearest_by_trying(here: Setting, count: int) -> float | None:
    """The least distance of exactly `count` pins set to other values so that a layout is safe, one by one."""
    recipe = here.recipe
    space = here.backend.space(recipe)
    best: float | None = None
    values = {name: (1, 2, 4, 8) if name == "data" else offered_values(recipe, space, name) for name in recipe.pins}
    names = [name for name in recipe.pins if name not in FEW_WORDS]
    for keep in product((True, False), repeat=len(names)):
        freed = [name for name, pinned in zip(names, keep, strict=True) if not pinned]
        if len(freed) != count or not safe(here, {n: p for n, p in recipe.pins.items() if n not in freed}):
            continue
        for chosen in product(*(values[name] for name in freed)):
            new = {name: as_written(name, value) for name, value in zip(freed, chosen, strict=True)}
            far = sum(away(n, v, recipe.pins[n]) for n, v in zip(freed, chosen, strict=True))
            if all(new[n] != recipe.pins[n] for n in freed) and (best is None or far < best - 1e-9) \
                    and safe(here, {**recipe.pins, **new}):  # fmt: skip
                best = far
    return best


def as_written(name: str, value: int) -> Any:
    return RECOMPUTE_NAMES[value] if name == "recompute" else bool(value) if name == "sequence_parallel" else value


@pytest.mark.parametrize("tensor", share(["4", "[1, 2]"], ["[1, 2]"]))
def test_of_several_single_changes_the_least_far_is_named_with_the_pin_as_it_was(tensor: str) -> None:
    # micro-batch 1 would do as well, five doublings away
    pins = f"tensor: {tensor}, pipeline: 4, context: 1, micro_batch_size: 32, recompute: full"
    change = find_advice(gallery_setting("llama3-70b", f"layout={{{pins}}}", "memory.limit=0.8")).change
    assert change is not None
    assert change.sentence() == f"set layout.tensor: 8 (from {tensor})"


def test_a_pin_is_named_as_the_recipe_writes_it() -> None:
    overrides = "layout={recompute: none, tensor: 4, pipeline: 4, distributed_optimizer: false, preference: off}"
    change = find_advice(gallery_setting("llama3-70b", overrides)).change
    assert change is not None
    assert change.sentence() == "set layout.distributed_optimizer: true (from false)"
    assert plan_of("llama3-70b", overrides, *overrides_of(dict(change.settings))).safe


def test_what_belonged_to_the_pinned_recompute_goes_with_it() -> None:
    pins = "tensor: 4, pipeline: 1, data: 2, recompute: selective, recompute_modules: [core_attn], zero_stage: 1"
    here = gallery_setting("llama3-8b", *SMALL, f"layout={{{pins}, micro_batch_size: 8}}")
    change = find_advice(here).change
    assert change is not None
    if "layout.recompute" in change.settings:
        assert change.settings["layout.recompute_modules"] is None
    assert make_plan(setting_for(change.recipe)).safe


def test_where_no_layout_change_does_the_search_gets_its_techniques_back_and_the_recipe_so_changed_is_safe() -> None:
    wide = "model={base: llama2-7b, vocab_size: 256000}"
    # a length that Ulysses cannot split
    narrow = ("training.sequence_length=32767", "cluster=a100-40gb-x8", "nodes=1", wide)
    overrides = (*narrow, "layout.techniques=asked")
    here = gallery_setting("llama2-7b-deepspeed", *overrides)
    assert not np.any(search(here).safe)
    change = find_advice(here).change
    assert change is not None
    assert change.sentence() == "remove layout.techniques"
    plan = make_plan(setting_for(change.recipe))
    assert plan.layout == change.layout
    assert plan.chosen.techniques.loss == "tiled"


def test_a_word_of_the_recipe_that_stands_in_the_way_is_set_to_what_would_be_chosen() -> None:
    overrides = ("nodes=1", "layout={offload_optimizer: 0.0}")
    change = find_advice(gallery_setting("llama3-70b", *overrides)).change
    assert change is not None
    assert change.sentence() == "set layout.offload_optimizer: 1.0 (from 0.0)"
    assert plan_of("llama3-70b", *overrides, *overrides_of(dict(change.settings))).layout == change.layout


def test_more_nodes_come_after_the_techniques_and_keep_the_pins_that_can_stay() -> None:
    overrides = (
        "model=llama3-405b",
        "nodes=2",
        "layout={tensor: 8, context: 1, micro_batch_size: 1, techniques: asked}",
    )
    change = find_advice(gallery_setting("llama3-70b", *overrides)).change
    assert change is not None
    assert list(change.settings) == ["nodes"]
    assert plan_of("llama3-70b", *overrides, *overrides_of(dict(change.settings))).safe


def test_an_unsafe_plan_carries_the_change_as_words_to_write() -> None:
    overrides = (*SMALL, "layout={tensor: 1, pipeline: 1}")
    plan = plan_of("llama3-8b", *overrides)
    assert not plan.safe
    assert plan.changes is not None
    assert plan_json(plan)["changes"] == dict(plan.changes)
    assert plan_of("llama3-8b", *overrides, *overrides_of(dict(plan.changes))).safe


def test_where_nothing_helps_the_advice_says_what_was_tried() -> None:
    here = gallery_setting("llama3-8b", *SMALL, "layout.offload_optimizer=0.0", "memory={limit: 0.001, floor_gib: 0}")
    advice = find_advice(here)
    assert advice.change is None
    assert "more nodes" in advice.sentence


def test_stages_named_unevenly_are_made_even_before_several_pins_change() -> None:
    pins = "tensor: 4, pipeline: 2, context: 1, data: 64, micro_batch_size: 1, recompute: full, zero_stage: 1"
    here = gallery_setting("llama3-70b", f"layout={{layers_by_stage: [79, 1], {pins}, offload_optimizer: 0.0}}")
    change = find_advice(here).change
    assert change is not None
    assert change.sentence() == "remove layout.layers_by_stage"
    assert make_plan(setting_for(change.recipe)).safe
