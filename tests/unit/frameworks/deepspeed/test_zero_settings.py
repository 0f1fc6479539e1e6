"""What of ds_config.json decides memory and time: read from a recipe, priced, and kept in a record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmlaunch.facts import MemoryFacts
from llmlaunch.families.hub_ids import load_preset
from llmlaunch.frameworks.deepspeed.backend import DeepSpeed
from llmlaunch.layers.parameters import count_parameters
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.job import Job, all_ranks
from llmlaunch.memory.states import States, states
from llmlaunch.recipe.types import Recipe
from llmlaunch.timing.step import update_seconds
from llmlaunch.workload import OptimizerFormats
from support.changed_facts import changed
from support.recipes import recipe_of

BUCKET = 50_000_000
TWO_NODES = Layout(data=16, zero_stage=3)
SCRIPT = "script: train.py, script_kind: hugging-face"


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    job = ("model=llama3-8b", "cluster=h100-80gb-x8", "nodes=2", "training.global_batch_size=128")
    return recipe_of("llama2-7b-deepspeed", *job, f"backend={{name: deepspeed, {SCRIPT}}}")


def with_settings(recipe: Recipe, settings: dict[str, Any]) -> Recipe:
    return replace(recipe, backend=replace(recipe.backend, ds_config=settings))


def in_bf16(recipe: Recipe) -> Recipe:
    return replace(recipe, training=replace(recipe.training, optimizer=OptimizerFormats("bf16", "bf16", "bf16")))


def zero(recipe: Recipe, **settings: Any) -> Recipe:
    return with_settings(recipe, {"zero_optimization": settings})


def facts_of(recipe: Recipe) -> MemoryFacts:
    return DeepSpeed().facts(recipe)


def job_of(recipe: Recipe) -> Job:
    return Job(recipe.model, recipe.workload, facts_of(recipe))


def states_of(recipe: Recipe, layout: Layout = TWO_NODES) -> States:
    job = job_of(recipe)
    return states(job, all_ranks(job, LayoutColumns.of([layout])))


def gathers_of(recipe: Recipe) -> tuple[float, float]:
    """Seconds of the first gather of a step, and of each later one."""
    update = update_seconds(job_of(recipe), recipe.cluster, LayoutColumns.of([TWO_NODES]))
    return float(update.gather_seconds[0]), float(update.later_gather_seconds[0])


def test_the_limits_of_gathering_are_those_of_the_file(recipe: Recipe) -> None:
    own = zero(
        recipe,
        stage3_prefetch_bucket_size=1,
        stage3_max_live_parameters=2,
        stage3_max_reuse_distance=3,
        stage3_param_persistence_threshold=4,
        stage3_model_persistence_threshold=5,
        stage3_allgather_sequential=True,
    )
    gathering = facts_of(own).zero.gathering
    assert gathering is not None
    assert list(vars(gathering).values())[:6] == [1, 2, 3, 4, 5, True]


def test_auto_is_what_the_trainer_fills_in(recipe: Recipe) -> None:
    auto = {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    gathering = facts_of(zero(recipe, **auto)).zero.gathering
    assert gathering is not None
    assert (gathering.prefetch_elements, gathering.persistent_elements) == (int(0.9 * 4096**2), 40960)


def test_a_reuse_distance_above_the_live_parameters_costs_memory(recipe: Recipe) -> None:
    recipe = replace(recipe, model=load_preset("llama2-7b"))
    few = {"stage3_max_live_parameters": 30_000_000, "stage3_prefetch_bucket_size": 30_000_000}
    less = states_of(zero(recipe, **few, stage3_max_reuse_distance=30_000_000)).parameters[0]
    more = states_of(zero(recipe, **few, stage3_max_reuse_distance=1_000_000_000)).parameters[0]
    assert more > less + 2**29


def test_buckets_follow_overlap_and_contiguous_gradients(recipe: Recipe) -> None:
    one = 2 * BUCKET
    assert facts_of(recipe).zero.bucket_bytes == 3 * one
    assert facts_of(zero(recipe, overlap_comm=False)).zero.bucket_bytes == 2 * one
    kept, made = states_of(recipe), states_of(zero(recipe, contiguous_gradients=False))
    assert kept.forward[0] - made.forward[0] == kept.buckets[0] - made.buckets[0] == one
    assert kept.backward[0] == made.backward[0]


def test_a_second_shard_takes_memory_and_spares_gathers_between_nodes(recipe: Recipe) -> None:
    second = zero(recipe, zero_hpz_partition_size=8)
    more = states_of(second).parameters[0] - states_of(recipe).parameters[0]
    assert more == pytest.approx(2 * count_parameters(recipe.model).total / 8)
    first, later = gathers_of(second)
    assert later < 0.8 * first
    assert gathers_of(recipe) == (first, first)


def test_a_second_shard_of_all_ranks_spares_nothing(recipe: Recipe) -> None:
    first, later = gathers_of(zero(recipe, zero_hpz_partition_size=16))
    assert later == pytest.approx(first, rel=0.01)


@pytest.mark.parametrize(("stage", "least"), [(1, 2 + 6 / 16), (2, 2 + 6 / 16), (3, 10 / 16)])
def test_narrow_optimizer_states_take_two_bytes_each(recipe: Recipe, stage: int, least: float) -> None:
    """Master weights and two moments, beside parameters and, in ZeRO 3, their gradients."""
    quiet = {"stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    own = with_settings(in_bf16(recipe), {"zero_optimization": quiet})
    state = states_of(own, Layout(data=16, zero_stage=stage))
    without = replace(job_of(own), facts=changed(facts_of(own), gathering=None))
    gathered = 0.0
    if stage == 3:
        rows = all_ranks(without, LayoutColumns.of([Layout(data=1, zero_stage=3)]))
        gathered = float(state.parameters[0] - states(without, rows).parameters[0] / 16)
    total = count_parameters(recipe.model).total
    lasting = state.parameters[0] + state.gradients[0] + state.optimizer[0] - gathered
    assert lasting / total == pytest.approx(least)
