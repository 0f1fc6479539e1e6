"""An empty space is never a bare 'no solution': the tightest rule is named, and the pins that contradict another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from llmlaunch.errors import UserError
from llmlaunch.planner.changes import relax_pins, rules_failed
from llmlaunch.planner.no_legal_layout import legal_values, no_layout, tightest_rule
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.search import search
from llmlaunch.planner.search_space import enumerate_splits, technique_space
from llmlaunch.planner.setting import Setting
from llmlaunch.recipe.load import load_recipe
from support.plans import any_legal, gallery_setting, plan_of, setting_for, technique_layouts
from support.recipes import recipe_text
from support.soak import examples, share

GOOD = recipe_text(layout="\n  micro_batch_size: 1")


def refusal(name: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        plan_of(name, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_two_pins_that_contradict_each_other_are_named_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD + "  virtual_pipeline: 4\n  tensor: 2\n  pipeline: 1\n")
    with pytest.raises(UserError) as caught:
        make_plan(setting_for(load_recipe(path)))
    message = str(caught.value)
    # in the schema's order
    assert message.startswith(
        f"{path}:13: layout.pipeline: 1 contradicts layout.virtual_pipeline: 4 ({path}:11): virtual pipeline stages"
    )
    assert "[virtual-needs-pipeline; megatron/training/arguments.py" in message
    assert "tensor" not in message.split(". Legal")[0].split(":", 2)[2].replace("tensor-model", "")
    assert "Legal would be layout.pipeline: 2, 4, 8, or layout.virtual_pipeline: 1." in message


CLASHES = {
    "an expert size that no tensor size can meet": (
        ("mixtral-8x7b", "nodes=1", "layout={expert: 8, expert_tensor: 2, pipeline: 1}"),
        ("layout.expert: 8 contradicts layout.expert_tensor: 2", "[expert-world;"),
    ),
    "a pin that a technique rules out": (
        ("llama3-70b", "layout={offload_optimizer: 1.0, zero_stage: 0, tensor: 8}"),
        ("layout.zero_stage: 0 contradicts layout.offload_optimizer: 1.0: offload_optimizer needs",),
    ),
    # 2 of 32 devices are left over, and 81 layers have no pipeline of 2 to use them
    "no split of the devices": (
        (
            "llama3-8b",
            "model={base: llama3-8b, num_layers: 81}",
            "layout={data: 16, tensor: 1, context: 1, layers_by_stage: even}",
        ),
        (
            "layout.tensor: 1, layout.context: 1 and layout.data: 16 contradict one another",
            "they leave no split of 32 devices (4 nodes x 8)",
        ),
    ),
    "two of three pins": (
        ("llama3-8b", "layout={tensor: 1, sequence_parallel: true, context: 2}"),
        (": layout.tensor: 1 contradicts layout.sequence_parallel: true: ",),
    ),
    "too many chunks": (
        ("llama3-8b", "layout={pipeline: 8, virtual_pipeline: 8, recompute: full}"),
        (": layout.pipeline: 8 contradicts layout.virtual_pipeline: 8: ",),
    ),
    "one alone": (
        ("llama3-8b", "layout={pipeline: [2, 4], virtual_pipeline: 3, layers_by_stage: even}"),
        (": layout.virtual_pipeline: 3 leaves no legal layout: ",),
    ),
}


@pytest.mark.parametrize("name", share(CLASHES, [name for name in CLASHES if "expert size" not in name]))
def test_the_pins_that_clash_are_named_and_no_others(name: str) -> None:
    overrides, sentences = CLASHES[name]
    message = refusal(*overrides)
    assert all(sentence in message for sentence in sentences), message


def test_where_no_pin_is_to_blame_the_tightest_rule_and_what_would_satisfy_it_are_named() -> None:
    message = refusal("quickstart", "training.global_batch_size=7")
    assert "[batch; deepspeed/runtime/config.py" in message
    assert "training.global_batch_size: 8 (from 7)" in message
    assert len(search(gallery_setting("quickstart", "training.global_batch_size=8")).points)


def test_the_tightest_rule_is_the_one_whose_relaxation_leaves_the_most() -> None:
    here = gallery_setting(
        "llama3-8b",
        "nodes=1",
        "model.num_layers=8",
        "layout={pipeline: 1, virtual_pipeline: 4, context: 1, techniques: asked}",
    )
    tightest, _ = tightest_rule(here)
    rules = here.backend.rules(here.recipe)
    splits = enumerate_splits(here.recipe, here.backend.space(here.recipe))
    left: Counter[str] = Counter()
    for recipe, layouts in technique_layouts(technique_space(here.recipe, here.backend), splits):
        for rule in rules:
            others = rules_failed(recipe, layouts, [other for other in rules if other is not rule])
            left[rule.key] += int(np.count_nonzero(~others.any(axis=0)))
    assert tightest is not None
    assert left[tightest.key] == max(left.values())


PINS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "tensor": st.sampled_from([1, 2, 8]),
        "pipeline": st.sampled_from([1, 2, 4]),
        "virtual_pipeline": st.sampled_from([1, 2, 8]),
        "sequence_parallel": st.booleans(),
        "data": st.sampled_from([1, 2, 8]),
        "micro_batch_size": st.sampled_from([1, 8]),
    },
)


def legal_with(here: Setting, keep: Iterable[str]) -> bool:
    return any_legal(here.with_recipe(relax_pins(here, keep)))


@examples(2)
@given(PINS)
def test_the_named_pins_clash_and_no_fewer_do(pins: dict[str, Any]) -> None:
    few = ("nodes=1", "model.num_layers=8", "training.global_batch_size=24", "layout.techniques=asked")
    base = gallery_setting("llama3-8b", *few)
    fixed = ("offload_optimizer", "offload_modules", "gradient_dtype", "recompute_modules", "recompute_method")
    here = base.with_recipe(replace(base.recipe, pins=pins, fixed=fixed))
    assume(not legal_with(here, pins))
    clash = legal_values(here, here.with_recipe(relax_pins(here))).conflict()
    assert clash
    assert not legal_with(here, clash)
    assert all(legal_with(here, some) for size in range(len(clash)) for some in combinations(pins, size))
    for name in clash:
        assert name in str(no_layout(here))
