"""Bytes between nodes, by hand; and what an order is expected to gain."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from llmlaunch.cluster.matrix import BandwidthMatrix
from llmlaunch.frameworks.framework import backend_for
from llmlaunch.layers.parameters import count_parameters
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.placement.traffic import Volumes, inverse, order_seconds, traffic
from llmlaunch.planner.placement import ExpectedPlacement, expected_placement, layout_sizes, step_volumes
from llmlaunch.recipe.types import Recipe
from llmlaunch.timing.step import step_time, update_seconds
from support.plans import setting_for
from support.recipes import recipe_of


def volumes(recipe: Recipe, layout: Layout) -> Volumes:
    return step_volumes(recipe, layout, backend_for(recipe).facts(recipe))


def test_a_pipeline_sends_its_activations_once_for_every_p_micro_batches() -> None:
    recipe = recipe_of("llama3-70b", "training.global_batch_size=1024")
    layout = Layout(tensor=8, pipeline=4, data=16, zero_stage=1, sequence_parallel=1)
    tokens = recipe.workload.sequence_length
    assert volumes(recipe, layout).pipeline == 16 * 2 * tokens * recipe.model.hidden_size / 8
    without = replace(layout, sequence_parallel=0)
    assert volumes(recipe, without).pipeline == 8 * volumes(recipe, layout).pipeline


def test_rings_carry_gradients_and_parameters_of_every_stage() -> None:
    recipe = recipe_of("llama3-70b")
    layout = Layout(tensor=8, pipeline=4, data=16, zero_stage=1)
    sent = volumes(recipe, layout).data
    # fp32 gradients reduced, bf16 parameters gathered, 15 of 16 shares over each link
    whole = sum(sent) / ((4 + 2) * 15 / 16) * 8
    assert whole == pytest.approx(count_parameters(recipe.model).total, rel=1e-3)
    assert sent[0] > sent[1] == sent[2]
    plain = volumes(recipe, replace(layout, zero_stage=0)).data
    assert plain[1] == pytest.approx(sent[1] * 8 / 6)


def test_experts_have_rings_and_exchanges_of_their_own() -> None:
    recipe = recipe_of("mixtral-8x7b")
    sent = volumes(recipe, Layout(data=32, expert=8, zero_stage=1))
    assert sum(sent.expert_data) > 0 == sent.expert
    assert volumes(recipe, Layout(tensor=2, data=16, expert=8, expert_tensor=2, zero_stage=1)).expert > 0
    assert volumes(recipe_of("llama3-70b"), Layout(tensor=8, data=64)).expert == 0


def test_adapters_have_little_to_reduce() -> None:
    whole = recipe_of("llama2-7b-deepspeed")
    adapted = recipe_of("llama2-7b-deepspeed", "training.adapters={rank: 8}")
    layout = Layout(data=8, zero_stage=1)
    assert volumes(adapted, layout).data[0] < 0.01 * volumes(whole, layout).data[0]


def measured(recipe: Recipe, nodes: int, far: float = 5e9) -> Recipe:
    """With a matrix in which each four nodes are near each other."""
    speeds = tuple(tuple(20e9 if i // 4 == j // 4 else far for j in range(nodes)) for i in range(nodes))
    matrix = BandwidthMatrix(tuple(f"n{i:03}" for i in range(nodes)), speeds)
    return replace(recipe, cluster=replace(recipe.cluster, bandwidth=matrix))


def expected(recipe: Recipe, layout: Layout) -> ExpectedPlacement | None:
    return expected_placement(setting_for(recipe), layout)


def test_the_gain_is_expected_only_where_a_matrix_covers_the_job() -> None:
    recipe = recipe_of("llama3-70b", "nodes=8")
    layout = Layout(tensor=8, pipeline=4, data=2, zero_stage=1)
    assert expected(recipe, layout) is None
    assert expected(measured(recipe, 7), layout) is None
    assert expected(replace(measured(recipe, 8), placement="slurm"), layout) is None
    placement = expected(measured(recipe, 10), layout)
    assert placement is not None
    assert placement.proved
    assert placement.nodes == tuple(f"n{i:03}" for i in range(8))
    assert placement.seconds < 0.9 * placement.slurm_order_seconds
    assert placement.gain_seconds > 0


@pytest.mark.parametrize("far", [1e6, 1e8, 5e9])
def test_no_order_saves_more_than_the_step_takes(far: float) -> None:
    recipe, layout = recipe_of("llama3-70b", "nodes=8"), Layout(tensor=8, pipeline=4, data=2, zero_stage=1)
    placement = expected(measured(recipe, 8, far), layout)
    assert placement is not None
    assert 0 < placement.gain_seconds < placement.slurm_order_step_seconds
    assert placement.slurm_order_seconds < placement.slurm_order_step_seconds


OF_ALL_KINDS = {
    "llama3-8b": [
        Layout(data=32, zero_stage=0),
        Layout(tensor=4, pipeline=4, virtual_pipeline=2, data=2, zero_stage=1),
        Layout(tensor=2, context=2, pipeline=2, data=4, zero_stage=1, sequence_parallel=1),
        Layout(context=8, data=4, zero_stage=1),
    ],
    "mixtral-8x7b": [
        Layout(data=32, expert=8, zero_stage=1),
        Layout(tensor=2, data=16, expert=8, expert_tensor=2, zero_stage=1, sequence_parallel=1),
        Layout(pipeline=4, data=8, expert=8, zero_stage=1),
    ],
    "qwen3-30b-a3b": [Layout(data=32, expert=32, zero_stage=1), Layout(pipeline=2, data=16, expert=16, zero_stage=1)],
    "llama2-7b-deepspeed": [Layout(data=32, zero_stage=stage) for stage in range(4)],
}


def between_and_step(recipe: Recipe, layout: Layout, factor: float) -> tuple[float, float]:
    """Return the seconds that placement counts and those of the whole step, on an uneven network times a factor."""
    chance = random.Random(1)
    speeds = [[factor * chance.uniform(16e9, 20e9) for _ in range(4)] for _ in range(4)]
    matrix = BandwidthMatrix(("n0", "n1", "n2", "n3"), tuple(map(tuple, speeds)))
    cluster = replace(recipe.cluster, bandwidth=matrix).between(4, range(4))
    job = setting_for(recipe).job
    terms = traffic(layout_sizes(layout), step_volumes(recipe, layout, job.facts), cluster.devices_per_node)
    step = float(step_time(job, cluster, LayoutColumns.of([layout])).total[0])
    return order_seconds(terms, range(4), inverse(speeds)), step


@pytest.mark.parametrize("name", OF_ALL_KINDS)
def test_what_placement_counts_between_nodes_is_part_of_the_step(name: str) -> None:
    """It counts at most what a step takes; and where nothing can hide it any more, a network half as fast makes the
    step longer by what placement counts more, and hardly by anything else."""
    recipe = recipe_of(name, "nodes=4")
    for layout in OF_ALL_KINDS[name]:
        pairs = {factor: between_and_step(recipe, layout, factor) for factor in (20.0, 1.0, 0.002, 0.001)}
        assert all(0 < between <= step for between, step in pairs.values()), layout.describe()
        (between, step), (slower_between, slower_step) = pairs[0.002], pairs[0.001]
        share = (slower_between - between) / (slower_step - step)
        assert 0.8 < share < 1.001, layout.describe()  # the rest: exchanges of the bubble, an interleaved round trip


@pytest.mark.parametrize("dispatcher", ["alltoall", "flex"])
def test_an_exchange_is_counted_as_its_dispatcher_sends(dispatcher: str) -> None:
    recipe = recipe_of("qwen3-30b-a3b", "nodes=4")
    recipe = replace(recipe, techniques=replace(recipe.techniques, token_dispatcher=dispatcher))
    layout = Layout(data=32, expert=32, zero_stage=1)
    pairs = [between_and_step(recipe, layout, factor) for factor in (1.0, 0.002, 0.001)]
    assert all(between <= step for between, step in pairs)
    share = (pairs[2][0] - pairs[1][0]) / (pairs[2][1] - pairs[1][1])
    assert 0.8 < share < 1.001


def test_a_ring_has_as_many_adapters_as_in_the_step_time() -> None:
    """Eight members in a node share what leaves it; on an even network both say the same, but for latencies."""
    recipe, layout = measured(recipe_of("llama3-8b", "nodes=4"), 4), Layout(data=32, zero_stage=1)
    placement = expected(recipe, layout)
    raw = update_seconds(setting_for(recipe).job, recipe.cluster.between(4), LayoutColumns.of([layout]))
    assert placement is not None
    assert placement.seconds == pytest.approx(float(raw.reduce_seconds[0] + raw.gather_seconds[0]), rel=0.02)
