"""Layouts for fewer nodes train the same batch, are as safe as the planned one, and go on from its checkpoints."""

from __future__ import annotations

from itertools import pairwise

import pytest

from llmlaunch.app.planned_run import plan
from llmlaunch.errors import UserError
from llmlaunch.planner.fallbacks import can_load
from llmlaunch.planner.fewer_nodes import MOST_LAYOUTS, WORTH
from llmlaunch.planner.plan import Plan
from llmlaunch.recipe.types import Recipe
from llmlaunch.report.check_screen import check_screen
from llmlaunch.report.plan_text import check_text
from llmlaunch.report.terminal import Surface
from support.recipes import recipe_of

SAVING = ("training.checkpoint_path=/ckpt", "training.save_interval=10")


def planned(name: str, *words: str) -> tuple[Recipe, Plan]:
    run = plan(recipe_of(name, *SAVING, *words))
    return run.recipe, run.plan


@pytest.mark.parametrize(
    ("name", "words", "counts"),
    [
        ("llama2-7b-deepspeed", ("nodes={count: 4, at_least: 1}",), [2, 1]),  # 24 devices share no batch of 512
        ("llama3-8b", ("nodes.at_least=1", "layout={tensor: 2, pipeline: 1, techniques: asked}"), [2, 1]),
    ],
)
def test_each_keeps_the_batch_is_safe_and_loads_what_the_others_save(
    name: str, words: tuple[str, ...], counts: list[int]
) -> None:
    recipe, whole = planned(name, *words)
    assert whole.fewer_nodes is not None
    assert [nodes for nodes, _ in whole.fewer_nodes.plans] == counts
    before = whole
    for nodes, fewer in whole.fewer_nodes.plans:
        layout = fewer.layout
        assert fewer.safe
        assert fewer.limit == whole.limit
        assert layout.world_size == nodes * recipe.cluster.devices_per_node
        samples = layout.data * layout.micro_batch_size * layout.num_microbatches(recipe.workload.global_batch_size)
        assert samples == recipe.workload.global_batch_size
        assert all(getattr(layout, name) == value for name, value in recipe.pins.items())
        others = [whole.chosen, *(other.chosen for _, other in whole.fewer_nodes.plans)]
        assert all(can_load(recipe, other, fewer.chosen) and can_load(recipe, fewer.chosen, other) for other in others)
        assert before.chosen.step_seconds < fewer.chosen.step_seconds
        before = fewer


def test_there_are_few_of_them_and_each_number_of_nodes_is_worth_its_folder() -> None:
    _, whole = planned("llama3-8b", "nodes={count: 24, at_least: 1}", "layout.techniques=asked")
    assert whole.fewer_nodes is not None
    plans = whole.fewer_nodes.plans
    assert 2 < len(plans) <= MOST_LAYOUTS
    assert plans[-1][0] == 1
    times = [fewer.chosen.step_seconds for _, fewer in plans]
    assert all(more < (1.0 - WORTH) * less for more, less in pairwise(times))


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("llama3-8b", ("nodes.at_least=3", "layout.data=16"), "no layout for 3 of 4 nodes: 24 devices cannot be split"),
        ("llama2-7b-deepspeed", ("nodes.at_least=1", "layout={tensor: 2}"), "cut by tensor parallelism is not conv"),
        (
            "llama3-8b",
            ("nodes.at_least=2", "cluster.host_memory_gib=400"),
            "in host memory, 359 GiB on a node, and half",
        ),
    ],
)
def test_what_cannot_go_on_with_fewer_is_refused_by_one_message(
    name: str, words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError) as refused:
        planned(name, *words)
    assert message in str(refused.value)
    assert "nodes.at_least: " in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nodes.at_least=4",), "nodes: at_least: 4 is not fewer than count: 4"),
        (("nodes={count: auto, at_least: 2}",), "nodes.count: must be a whole number"),
        (("nodes.at_least=2",), "nodes.at_least: there is nothing to go on from: no checkpoints are written"),
        (("nodes.at_least=2", *SAVING, "restart.within=queue"), "from the queue it gets all of them again; write"),
        (("nodes.at_least=2", *SAVING, "restart=none"), "from the queue it gets all of them again; write"),
    ],
)
def test_a_recipe_that_contradicts_itself_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe_of("llama3-8b", *words)


def test_a_script_of_ones_own_is_refused() -> None:
    own = ("backend={name: deepspeed, script: train.py}", "nodes={count: 2, at_least: 1}")
    with pytest.raises(UserError, match=r"whether backend\.script loads a checkpoint on another number of nodes"):
        planned("llama2-7b-deepspeed", *own)


def test_both_spellings_of_nodes_mean_the_same() -> None:
    assert recipe_of("llama3-8b", "nodes={count: 4}").digest == recipe_of("llama3-8b").digest
    asked = recipe_of("llama3-8b", *SAVING, "nodes={count: 4, at_least: 2}")
    assert (asked.nodes, asked.at_least_nodes) == (4, 2)
    assert asked.digest == recipe_of("llama3-8b", *SAVING, "nodes.at_least=2").digest


def test_check_says_what_fewer_nodes_would_cost() -> None:
    recipe, whole = planned("llama3-8b", "nodes.at_least=2", "cluster={base: h100-80gb-x8, usd_per_gpu_hour: 2.5}")
    screen = check_screen(recipe, whole, Surface(width=120))
    assert "Fewer   3 nodes: 17.74 s a step (+39%), the whole job" in screen
    assert "        2 nodes: 25.22 s a step (+98%)" in screen
    assert "If nodes are lost and none is spare, the same job continues (nodes.at_least: 2)" in check_text(
        recipe, whole
    )
    assert ", $" in screen
