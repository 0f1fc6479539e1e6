"""Of nearly equal layouts the planner chooses the one an expert would sign, by habits that are data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llmlaunch.frameworks.base import StateTechniques, StepTechniques
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, Layout, LayoutColumns
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.preference import (
    Habit,
    habits,
    preference_factor,
    prices_at,
    split_columns,
    technique_columns,
    within,
)
from llmlaunch.planner.pricing import Points, Rows
from llmlaunch.planner.search import search
from llmlaunch.report.plan_text import check_text
from support.plans import gallery_setting
from support.recipes import recipe_of

Techniques = StepTechniques | StateTechniques
Sample = Layout | Techniques
# By habit, what goes against it and what barely does not. On eight devices a node, 8,192 tokens a sequence.
SAMPLES: dict[str, tuple[Sample, Sample]] = {
    "optimizer on the host": (StateTechniques(offload_optimizer=0.5), StateTechniques()),
    "parameters on the host": (StateTechniques(offload_parameters=True), StateTechniques()),
    "activations on the host": (StepTechniques(solved="offload_layers"), StepTechniques(solved="recompute_layers")),
    "a technique switched on": (StepTechniques(tp_comm_overlap=True), StepTechniques(loss_tiles=4)),
    "context parallelism where the sequence does not need it": (Layout(context=2), Layout(context=1)),
    "a stage without layers": (Layout(pipeline=2, layers_by_stage=(4, 0)), Layout(pipeline=2, layers_by_stage=(3, 1))),
    "more than 16 pipeline ranks": (Layout(pipeline=18), Layout(pipeline=16)),
    "more than 32 pipeline ranks": (Layout(pipeline=64), Layout(pipeline=32)),
    "tensor parallelism beyond NVLink": (Layout(tensor=16), Layout(tensor=8)),
    "tensor parallelism across nodes of a rack": (Layout(tensor=16), Layout(tensor=8)),
    "experts spread beyond NVLink": (Layout(expert=16), Layout(expert=8)),
    "tensor parallelism inside experts": (Layout(expert_tensor=2), Layout(tensor=2, sequence_parallel=1)),
    "uneven stages": (Layout(pipeline=2, layers_by_stage=(3, 5)), Layout(pipeline=2)),
    "stages in the middle that differ": (
        Layout(pipeline=4, layers_by_stage=(1, 3, 2, 1)),
        Layout(pipeline=4, layers_by_stage=(1, 3, 3, 2)),
    ),
    "eight model chunks or more on a rank": (Layout(virtual_pipeline=8), Layout(virtual_pipeline=7)),
    "sixteen model chunks or more on a rank": (Layout(virtual_pipeline=16), Layout(virtual_pipeline=15)),
    "a size that is no power of two": (Layout(micro_batch_size=3), Layout(micro_batch_size=4)),
    "no sequence parallelism beside tensor parallelism": (Layout(tensor=2), Layout(tensor=2, sequence_parallel=1)),
    "a larger split": (Layout(pipeline=2), Layout(data=2)),
    "ZeRO stage above 1": (StateTechniques(zero_stage=2), StateTechniques(zero_stage=1)),
    "some modules recomputed": (StepTechniques(recompute=RECOMPUTE_SELECTIVE), StepTechniques()),
    "whole layers recomputed": (StepTechniques(recompute=RECOMPUTE_FULL), StepTechniques(recompute=1)),
}
RECIPE = recipe_of("llama3-8b")
HABITS = {habit.name: habit for habit in habits()}


def price(habit: Habit, sample: Sample) -> float:
    """What the habit costs a sample, 0 where it does not look at such things."""
    columns = (
        {name: float(column[0]) for name, column in split_columns(RECIPE, LayoutColumns.of([sample])).items()}
        if isinstance(sample, Layout)
        else technique_columns(sample)
    )
    return float(habit.prices(columns)) if habit.concerns(columns) else 0.0


@pytest.mark.parametrize("name", HABITS)
def test_each_habit_costs_its_price_where_it_applies_and_nothing_elsewhere(name: str) -> None:
    against, plain = SAMPLES[name]
    habit = HABITS[name]
    times = {"ZeRO stage above 1": 2}.get(name, 1)
    assert price(habit, against) == pytest.approx(habit.price * times)
    assert price(habit, plain) == 0.0


def test_the_samples_are_of_the_habits_there_are() -> None:
    assert set(SAMPLES) == set(HABITS)


@pytest.mark.parametrize("habit", habits(), ids=lambda habit: habit.name)
def test_each_habit_says_why_and_looks_at_what_there_is(habit: Habit) -> None:
    kinds = [split_columns(RECIPE, LayoutColumns.of([Layout()])), technique_columns(StepTechniques())]
    kinds.append(technique_columns(StateTechniques()))
    assert sum(habit.concerns(columns) for columns in kinds) == 1, "of the split, of the step or of the states"
    assert habit.each is None or any(habit.each in columns for columns in kinds if habit.concerns(columns))
    assert habit.reason
    assert not habit.reason.endswith(".")
    assert habit.price > 0
    assert habit.own_price or habit.price <= within(), "an ordinary habit decides between near equals alone"


NO_STATE_TECHNIQUES = StateTechniques()


def points_of(layouts: list[Layout], state: StateTechniques = NO_STATE_TECHNIQUES) -> Points:
    """Return points, one for each layout, all with the same techniques."""
    zero, ones = np.zeros(len(layouts), dtype=np.int64), np.ones(len(layouts))
    rows = Rows(np.arange(len(layouts)), zero, zero, zero, zero, ones, zero, ones, ones)
    return Points(LayoutColumns.of(layouts), (StepTechniques(),), (state,), rows)


ODD = Layout(tensor=3, pipeline=3, virtual_pipeline=16, expert_tensor=2, layers_by_stage=(4, 3, 2))


def test_ordinary_habits_together_cost_no_more_than_near_equals_differ_by() -> None:
    assert preference_factor(RECIPE, points_of([Layout(), ODD])).tolist() == pytest.approx([1.0, 1.0 + within()])


def test_a_price_of_its_own_comes_on_top() -> None:
    points = points_of([Layout(), ODD], state=StateTechniques(offload_optimizer=1.0))
    assert preference_factor(RECIPE, points).tolist() == pytest.approx([1.1, 1.1 + within()])


SMALL = ("nodes=2", "layout={tensor: [1, 2], micro_batch_size: [1, 2], context: [1, 2]}")


def test_the_chosen_layout_counts_least_and_the_ranking_follows() -> None:
    asked = gallery_setting("llama3-8b", *SMALL)
    result = search(asked)
    factor = preference_factor(asked.recipe, result.points)
    counted = result.step_seconds * factor
    assert np.all(factor >= 1.0)
    assert result.preferred_seconds == pytest.approx(counted)
    assert counted[result.first[0]] == pytest.approx(counted[result.safe].min(), rel=1e-9)
    assert np.all(np.diff(counted[result.first]) >= -1e-9)
    for index in np.linspace(0, len(counted) - 1, 40).astype(int):
        prices = prices_at(asked.recipe, result.points, int(index))
        ordinary = sum(price for habit, price in prices if not habit.own_price)
        own = sum(price for habit, price in prices if habit.own_price)
        assert factor[index] == pytest.approx(1.0 + min(ordinary, within()) + own)


def test_a_plan_names_the_faster_layout_and_the_habits_it_goes_against() -> None:
    """Llama 3 8B on eight devices that hold it by tensor parallelism, or with the optimizer on the host, which is
    faster."""
    pins = "pipeline: 1, context: 1, micro_batch_size: 1, zero_stage: 1, recompute: none"
    pins += ", offload_modules: [], offload_layers: 0"
    batch = "training.global_batch_size=512"
    asked = gallery_setting("llama3-8b", "nodes=1", batch, f"layout={{tensor: [1, 2], loss: native, {pins}}}")
    result = search(asked)
    splits, rows = result.points.splits, result.points.rows
    alone = splits.tensor[rows.split] == 1
    needed = result.device_bytes[alone]
    limit = replace(asked.limit, limit_bytes=int(needed.max()) - 1)
    asked = replace(asked, limit=limit)
    plan = make_plan(asked)
    fastest = make_plan(replace(asked, recipe=replace(asked.recipe, preference=False)))
    assert (plan.layout.tensor, fastest.layout.tensor) == (2, 1)
    assert fastest.faster is None
    assert plan.faster is not None
    assert plan.faster.candidate == fastest.chosen
    assert plan.faster.gain == pytest.approx(plan.chosen.step_seconds / fastest.chosen.step_seconds - 1.0)
    assert plan.faster.habits[0].name == "optimizer on the host"
    text = check_text(asked.recipe, plan)
    assert f"{plan.faster.gain:.1%} faster without the preference (layout.preference: off)" in text
    assert "optimizer on the host (10 % of a step)" in text
    assert "faster without" not in check_text(asked.recipe, fastest)


def test_a_plan_says_nothing_where_the_fastest_is_chosen() -> None:
    plan = make_plan(gallery_setting("llama3-8b", *SMALL, "layout.preference=off"))
    assert plan.faster is None
