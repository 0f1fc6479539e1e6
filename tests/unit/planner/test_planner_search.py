"""The search prices what it says it prices: every split with every set of words, amounts the fewest that are safe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlaunch.calibration.lessons import NO_LESSONS, Lessons
from llmlaunch.errors import UserError
from llmlaunch.frameworks.base import StateTechniques, StepTechniques
from llmlaunch.layout import RECOMPUTE_FULL, Layout, LayoutColumns
from llmlaunch.memory.estimator import estimate, worst_ranks
from llmlaunch.memory.grouped_pricing import model_state_bytes, transient_bytes, worst_of_sums
from llmlaunch.memory.job import Correction
from llmlaunch.planner.legality import first_failed, situation
from llmlaunch.planner.plan import as_planned
from llmlaunch.planner.search import SearchResult, search
from llmlaunch.planner.search_space import TechniqueSpace, enumerate_splits, recipe_with_techniques, technique_space
from llmlaunch.planner.setting import Setting, node_of
from llmlaunch.planner.technique_batches import fewest_safe, is_safe
from llmlaunch.timing.step import step_time
from support.plans import gallery_setting, setting_for
from support.recipes import recipe_of
from support.soak import in_soak

SMALL = ("nodes=1", "model.num_layers=8", "layout={tensor: [1, 2], micro_batch_size: [1, 2], context: 1}")
RECIPES = {
    "dense": ("llama3-8b", (*SMALL, "model.num_layers=4", "layout={micro_batch_size: 1, tensor: 2}")),
    "mixture": (
        "mixtral-8x7b",
        (
            "nodes=1",
            "model.num_layers=4",
            "layout={tensor: 1, micro_batch_size: 1, expert: [4, 8], context: 1, techniques: asked}",
        ),
    ),
    "deepspeed": ("llama2-7b-deepspeed", ("nodes=1",)),
    "cpu": ("quickstart", ()),
    "small card": ("llama3-8b", (*SMALL, "cluster=a100-40gb-x8", "layout.tensor=1", "memory.limit=0.45")),
}


# what measured runs said: nothing, that more is needed than predicted, and less
LESSONS = {
    "uncorrected": NO_LESSONS,
    "more": Lessons(correction=Correction(0.08, 2.5 * 2**30, "more")),
    "less": Lessons(correction=Correction(-0.15, -0.5 * 2**30, "less")),
}


def setting(name: str, *more: str, lessons: Lessons = NO_LESSONS) -> Setting:
    recipe_name, overrides = RECIPES[name]
    return gallery_setting(recipe_name, *overrides, *more, lessons=lessons)


@pytest.mark.parametrize(
    ("name", "said"),
    [("dense", "more"), ("mixture", "uncorrected"), ("deepspeed", "uncorrected"), ("cpu", "less")],
)
def test_every_point_is_what_the_estimator_and_the_step_time_say_of_its_layout(name: str, said: str) -> None:
    asked = setting(name, lessons=LESSONS[said])
    result = search(asked, whole=True)
    assert len(result.points)
    assert sum(result.refused.values()) + int(np.count_nonzero(result.safe)) == result.searched
    for index in np.linspace(0, len(result.points) - 1, 30).astype(int):
        candidate = result.at(asked.recipe, int(index))
        planned = as_planned(asked.recipe, candidate)
        job, columns = asked.job_of(planned), LayoutColumns.of([candidate.layout])
        worst = worst_ranks(job, columns)
        alone = estimate(job, candidate.layout, node=node_of(planned))
        assert candidate.device_bytes == int(worst.device_bytes[0]) == alone.worst.device_bytes
        assert candidate.worst_pipeline_rank == int(worst.pipeline_rank[0])
        assert result.points.rows.host_bytes[index] == alone.host_bytes_per_node
        assert candidate.step_seconds == pytest.approx(
            float(step_time(job, planned.cluster, columns).total[0]), rel=1e-12
        )


def every_layout(asked: Setting) -> Iterator[tuple[tuple[StepTechniques, StateTechniques], Layout, bool, float]]:
    """By brute force: (words, layout, safe, seconds) of every legal layout, amounts one after the other."""
    recipe, backend, node = asked.recipe, asked.backend, node_of(asked.recipe)
    splits, words = enumerate_splits(recipe, backend.space(recipe)), technique_space(recipe, backend)
    for step, state in product(words.step, words.state):
        said = recipe_with_techniques(recipe, step, state)
        job = asked.job_of(said)
        for name, amount in amounts(step, recipe.model.num_layers):
            layouts = splits.with_techniques(
                state.zero_stage, step.recompute, step.recompute_layers, step.offload_layers
            )
            layouts = layouts.with_amount(name, np.full(len(layouts), amount)) if name else layouts
            chunk = recipe.model.num_layers / (layouts.pipeline * layouts.virtual_pipeline)
            legal = first_failed(backend.rules(said), situation(said, layouts)) < 0
            layouts = layouts.take(legal & (chunk - (name == "offload_layers") >= amount))
            priced, states = transient_bytes(job, layouts, node), model_state_bytes(job, layouts, node)
            worst = worst_of_sums(priced, states, np.arange(len(layouts)))
            safe = is_safe(asked, worst.device_bytes, worst.host_bytes)
            seconds = step_time(job, recipe.cluster, layouts).total
            for index in range(len(layouts)):
                yield (step, state), layouts.row(index), bool(safe[index]), float(seconds[index])


def amounts(step: StepTechniques, layers: int) -> list[tuple[str, int]]:
    return [(step.solved, amount) for amount in range(1, layers + 1)] if step.solved else [("", 0)]


@pytest.mark.parametrize(
    ("name", "said"),
    [*in_soak(("dense", "uncorrected"), ("small card", "less")), ("mixture", "uncorrected"), ("small card", "more")],
)
def test_the_fastest_is_that_of_brute_force_over_every_split_word_and_amount(name: str, said: str) -> None:
    asked = setting(name, "layout.layers_by_stage=even", "layout.preference=off", lessons=LESSONS[said])
    safe = [seconds for _, _, fits, seconds in every_layout(asked) if fits]
    result = search(asked)
    assert np.any(result.safe) == bool(safe)
    assert result.step_seconds[result.safe].min() == pytest.approx(min(safe), rel=1e-12)
    assert not safe or result.candidate(asked.recipe, 0).step_seconds == pytest.approx(min(safe), rel=1e-11)


def test_amounts_are_the_fewest_that_are_safe_for_every_split() -> None:
    asked = setting("small card", "layout.layers_by_stage=even")
    least: dict[tuple[object, ...], int] = {}
    for words, layout, fits, _ in every_layout(asked):
        if words[0].solved and fits:
            amount = getattr(layout, str(words[0].solved))
            least.setdefault((words, split_of(layout)), amount)
    result = search(asked, whole=True)
    solved = [i for i in np.flatnonzero(result.safe) if result.points.techniques(i)[0].solved]
    assert solved, "no split of this recipe needs some layers and not all"
    for index in solved:
        step, state = result.points.techniques(index)
        layout = result.points.layout(int(index))
        assert getattr(layout, str(step.solved)) == least[(step, state), split_of(layout)]


def split_of(layout: Layout) -> Layout:
    return replace(layout, recompute_layers=0, offload_layers=0)


FEW_WORDS = (
    "recompute: [none, full], recompute_method: uniform, offload_optimizer: 0, offload_modules: [], offload_layers: 0"
)
UNEVEN = {
    "a fast end": (
        "llama3-8b",
        ("nodes=1", "layout={tensor: 1, pipeline: 4, virtual_pipeline: 1, micro_batch_size: 1, context: 1}"),
    ),
    "a full end": (
        "llama3-8b",
        (
            "nodes=1",
            "cluster=a100-40gb-x8",
            "memory.limit=0.5",
            "layout={tensor: 2, pipeline: 2, virtual_pipeline: 1, micro_batch_size: 1}",
        ),
    ),
    "dense layers first": (
        "mixtral-8x7b",
        ("nodes=1", "layout={tensor: 1, pipeline: 2, virtual_pipeline: 1, micro_batch_size: 1, expert: 4, context: 1}"),
    ),
}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *in_soak(("a fast end", "uncorrected"), ("a full end", "uncorrected")),
        *(("a full end", "more"), ("dense layers first", "uncorrected")),
    ],
)
def test_the_fastest_uneven_stages_are_those_of_brute_force(name: str, said: str) -> None:
    """Every way to cut nine layers, with and without recompute."""
    recipe_name, overrides = UNEVEN[name]
    words = [word.replace("layout={", f"layout={{{FEW_WORDS}, ") for word in (*overrides, f"model.num_layers={LAYERS}")]
    recipe = recipe_of(recipe_name, *words)
    if recipe.model.moe is not None:
        moe = replace(recipe.model.moe, layer_pattern=(0,) * 3 + (1,) * (LAYERS - 3))
        recipe = replace(recipe, model=replace(recipe.model, moe=moe))
    asked = setting_for(recipe, LESSONS[said])
    cuts = [cut for cut in product(range(1, LAYERS), repeat=recipe.pins["pipeline"]) if sum(cut) == LAYERS]
    named = (replace(recipe, layers_by_stage=cut) for cut in cuts)
    fastest = min(_fastest(search(asked.with_recipe(each))) for each in (replace(recipe, layers_by_stage=()), *named))
    assert _fastest(search(asked)) == pytest.approx(fastest, rel=1e-12)


LAYERS = 9


def _fastest(result: SearchResult) -> float:
    return float(result.step_seconds[result.safe].min(initial=np.inf))


@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), max_size=12),
)
def test_bisection_finds_the_fewest(rows: list[tuple[int, int]]) -> None:
    most, needed = np.array([m for m, _ in rows], dtype=np.int64), np.array([n for _, n in rows], dtype=np.int64)
    result = fewest_safe(lambda index, amount: amount >= needed[index], most, most >= needed)
    assert result.tolist() == np.minimum(most, needed).tolist()


@pytest.mark.parametrize("name", ["dense", "mixture", "deepspeed"])
def test_rules_that_do_not_look_at_words_say_the_same_for_all(name: str) -> None:
    asked = setting(name)
    recipe, backend = asked.recipe, asked.backend
    splits, words = enumerate_splits(recipe, backend.space(recipe)), technique_space(recipe, backend)
    rules = [rule for rule in backend.rules(recipe) if not rule.of_techniques]
    plain = first_failed(rules, situation(recipe, splits))
    for step, state in product(words.step, words.state):
        layouts = splits.with_techniques(state.zero_stage, step.recompute, 1, 1)
        assert np.array_equal(
            plain, first_failed(rules, situation(recipe_with_techniques(recipe, step, state), layouts))
        )


def searched(*overrides: str) -> SearchResult:
    return search(gallery_setting("llama3-8b", "nodes=1", *overrides), whole=True)


def offered(*overrides: str) -> TechniqueSpace:
    asked = gallery_setting("llama3-8b", "nodes=1", *overrides)
    return technique_space(asked.recipe, asked.backend)


def test_a_recipes_own_words_take_the_place_of_those_offered() -> None:
    space = offered("layout={recompute: selective, recompute_modules: [mlp], offload_optimizer: 0.5}")
    assert {step.recompute_modules for step in space.step} == {("mlp",)}
    assert {state.offload_optimizer for state in space.state} == {0.5}


def test_pinned_amounts_are_not_solved_and_others_are() -> None:
    pinned = searched("layout={recompute: full, recompute_method: block, recompute_layers: [2, 4]}")
    assert set(pinned.points.rows.recompute_layers.tolist()) == {2, 4}
    free = searched("cluster=a100-40gb-x8", "layout={recompute: full, recompute_method: block}")
    assert all(step.solved == "recompute_layers" for step in free.points.step_techniques)
    assert free.points.rows.recompute_layers.min() == 1, "where nothing needs to be recomputed, one layer is the least"


def test_zero_stages_of_another_implementation_are_searched_where_they_are_pinned() -> None:
    assert {state.zero_stage for state in offered("layout={}").state} == {0, 1}
    assert {state.zero_stage for state in offered("layout.zero_stage=[2, 3]").state} == {2, 3}
    with pytest.raises(UserError, match=r"layout\.zero_stage: 2 and 3 are Megatron-FSDP, another implementation"):
        searched("layout.zero_stage=[1, 2]")


def test_a_zero_stage_the_backend_has_not_is_refused_in_one_sentence() -> None:
    stages = "backend={name: deepspeed, script: own.py, script_kind: pipeline}"
    with pytest.raises(UserError, match=r"layout\.zero_stage: 3 is none of what deepspeed has \(0, 1\)"):
        searched(stages, "layout.zero_stage=3")


def test_full_recompute_that_is_pinned_is_of_every_layer() -> None:
    whole, some = offered("layout={recompute: full}"), offered("layout={recompute: [none, full]}")
    assert {(step.recompute_method, step.solved) for step in whole.step} == {("uniform", None)}
    assert "recompute_layers" in {step.solved for step in some.step}


def test_the_format_of_gradients_is_searched_only_where_the_recipe_says_auto() -> None:
    assert {state.gradient_dtype for state in offered().state} == {None}
    assert {state.gradient_dtype for state in offered("training.gradient_dtype=auto").state} == {"fp32", "bf16"}


def test_uniform_recompute_and_block_of_all_layers_are_the_same_layout() -> None:
    asked = setting("dense")
    recipe = asked.recipe
    uniform = Layout(tensor=2, data=4, micro_batch_size=1, sequence_parallel=1, zero_stage=1, recompute=RECOMPUTE_FULL)
    block = replace(uniform, recompute_layers=recipe.model.num_layers)
    techniques = replace(recipe.techniques, recompute_method="block")
    there = asked.job_of(replace(recipe, techniques=techniques))
    assert estimate(asked.job, uniform).worst == estimate(there, block).worst
