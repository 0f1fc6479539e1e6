"""The fewest nodes that do are found, every smaller number is refused for a reason, and budgets are kept."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlaunch.errors import NothingSafe, UserError
from llmlaunch.planner.plan import JobLength, Plan
from llmlaunch.planner.planning import make_plan, make_sized_plan, time_limit_note
from llmlaunch.planner.refusal import refuse
from llmlaunch.planner.search import search
from llmlaunch.planner.sizing import ALL_UP_TO, fewest_safe, smallest_cluster, splittable, stride
from llmlaunch.recipe.types import Recipe
from support.plans import any_legal, gallery_setting, setting_for
from support.recipes import recipe_of
from support.soak import examples, share

DAY = 86400


@cache
def sized(name: str, *overrides: str) -> tuple[Recipe, Plan]:
    setting, plan = make_sized_plan(gallery_setting(name, *overrides))
    return setting.recipe, plan


SPLIT = "layout={tensor: 1, pipeline: 1, context: 1, micro_batch_size: 1, techniques: asked}"
LONG = ("llama3-8b", "training.tokens=1T", "layout.techniques=asked")
LARGE = ("llama3-70b", "model=llama3-405b", "layout={tensor: 8, context: 1, micro_batch_size: 1, techniques: asked}")


def short_of(share: float) -> float:
    """Days that are too few: a share of what the job takes as it ships."""
    return round(share * sized(*LONG)[1].length.seconds / DAY, 1)


def safe_on(recipe: Recipe, nodes: int) -> bool:
    return bool(np.any(search(setting_for(replace(recipe, nodes=nodes))).safe))


STAY = "layout={offload_optimizer: 0.0, recompute: full}"
SMALL = {
    "pipelines of a divisor of 32": ("llama3-8b", "cluster=a100-40gb-x8", "cluster.devices_per_node=1", STAY),
    "batches of three": ("llama3-8b", "training.global_batch_size=96", "cluster.devices_per_node=1", STAY),
    "only seven of something": (
        "llama3-8b",
        "model.num_layers=14",
        "cluster.devices_per_node=2",
        STAY,
        "layout.pipeline=7",
    ),
    "split by data alone": ("llama2-7b-deepspeed", "cluster.devices_per_node=1", "training.global_batch_size=60", STAY),
    "a data parallel size": (
        *("llama3-8b", "cluster.devices_per_node=1", STAY, "layout.data=4", "layout.context=1"),
        *("model.num_layers=8", "cluster.accelerator.memory_gib=24"),
    ),
    "fits at once": ("quickstart",),
    "host memory": (
        "llama3-8b",
        "slurm.mem=100G",
        "layout={zero_stage: 1, offload_optimizer: 1.0, context: 1, recompute: full}",
    ),
}


@pytest.mark.parametrize(
    "name", share(SMALL, ("pipelines of a divisor of 32", "only seven of something", "host memory"))
)
def test_the_number_chosen_is_safe_and_no_smaller_one_is(name: str) -> None:
    recipe, plan = sized(*SMALL[name], "nodes=auto")
    assert plan.safe
    assert plan.layout.world_size == recipe.world_size
    by_hand = next(n for n in range(1, ALL_UP_TO) if safe_on(recipe, n))
    assert recipe.nodes == by_hand
    assert plan.sizing is not None
    assert [trial.nodes for trial in plan.sizing.tried] == list(range(1, by_hand + 1))
    assert all(trial.refused and trial.reason for trial in plan.sizing.tried[:-1])


def test_the_choice_is_the_plan_and_the_digest_of_that_number_written_down() -> None:
    recipe, plan = sized("llama3-8b", SPLIT, "nodes=auto", "budget.max_nodes=10")
    written = recipe_of("llama3-8b", SPLIT, f"nodes={recipe.nodes}")
    assert recipe.digest == written.digest
    assert replace(plan, sizing=None, budget=written.budget, expected=None) == make_plan(setting_for(written))


@examples(8)
@given(
    batch=st.integers(1, 60),
    tensor=st.sampled_from([None, 1, 2, 3]),
    data=st.sampled_from([None, 2, 5]),
    micro=st.sampled_from([None, 2, 3]),
)
def test_only_what_no_layout_could_split_is_left_out(
    batch: int, tensor: int | None, data: int | None, micro: int | None
) -> None:
    few = (
        "layout={zero_stage: 1, recompute: none, sequence_parallel: false, virtual_pipeline: 1, "
        "offload_optimizer: 0.0, offload_modules: [], offload_layers: 0}"
    )
    small = ("nodes=1", "cluster.devices_per_node=2", "training.sequence_length=1024", "model.num_layers=6")
    recipe = recipe_of("llama3-8b", *small, few)
    mine = {"tensor": tensor, "data": data, "micro_batch_size": micro}
    pins = {**recipe.pins, **{name: value for name, value in mine.items() if value is not None}}
    training = replace(recipe.training, global_batch_size=batch)
    setting = setting_for(replace(recipe, pins=pins, training=training))
    counts = np.arange(1, 11)
    for nodes, can in zip(counts.tolist(), splittable(setting, counts).tolist(), strict=True):
        assert can or not any_legal(setting.with_recipe(replace(setting.recipe, nodes=nodes)))


def test_counts_are_passed_over_only_beyond_those_tried_one_by_one_and_within_three_percent() -> None:
    assert {stride(nodes) for nodes in range(1, ALL_UP_TO + 1)} == {1}
    for nodes in range(ALL_UP_TO + 1, 5000):
        assert 1 < stride(nodes) < nodes / 31
    pinned = (
        "layout={tensor: 1, pipeline: 1, context: 1, recompute: none, zero_stage: 0, techniques: asked}",
        "slurm.mem=1G",
    )
    overrides = ("nodes=1", "cluster.devices_per_node=1", "training.global_batch_size=720720", *pinned)
    trials = smallest_cluster(gallery_setting("llama3-8b", *overrides), 1, 264).tried
    searched = [trial.nodes for trial in trials if trial.refused != "no_layout"]
    divisors = [n for n in range(1, 265) if 720720 % n == 0]
    assert [n for n in searched if n <= ALL_UP_TO] == [n for n in divisors if n <= ALL_UP_TO]
    for n in divisors:
        assert any(n - stride(n) < near <= n for near in searched)
    assert searched[-1] == 264


def test_days_are_met_by_the_fewest_nodes_that_meet_them() -> None:
    days = short_of(0.3)
    unhurried, _ = sized(*LONG, "nodes=auto")
    recipe, plan = sized(*LONG, "nodes=auto", f"budget.days={days}")
    assert plan.good
    assert recipe.nodes > unhurried.nodes
    assert plan.length.seconds <= days * DAY
    assert plan.sizing is not None
    before = [trial for trial in plan.sizing.tried[:-1] if trial.length is not None]
    assert {trial.refused for trial in plan.sizing.tried[:-1]} <= {"no_layout", "memory", "days"}
    assert all(trial.length is not None and trial.length.seconds > days * DAY for trial in before)
    assert make_plan(setting_for(replace(recipe, nodes=before[-1].nodes))).length == before[-1].length


def test_a_budget_that_a_fixed_number_of_nodes_exceeds_names_the_fewest_that_do_not() -> None:
    days = short_of(0.6)
    recipe, plan = sized(*LONG, f"budget.days={days}")
    assert plan.safe
    assert not plan.good
    with pytest.raises(NothingSafe) as refused:
        refuse(plan)
    message = str(refused.value)
    assert f"of budget.days: {days}" in message
    enough, _ = sized(*LONG, f"budget.days={days}", "nodes=auto")
    assert f"The fewest that stay within it: nodes: {enough.nodes} (" in message
    refuse(make_sized_plan(setting_for(enough))[1])
    assert recipe.nodes == 4


def test_more_nodes_than_there_are_may_be_what_is_missing() -> None:
    plan = sized(*LONG, f"budget={{days: {short_of(0.6)}, max_nodes: 4}}")[1]
    assert plan.beyond_budget is not None
    assert "More would: budget.max_nodes: " in plan.beyond_budget


def test_a_budget_nothing_meets_is_answered_with_the_nearest() -> None:
    plan = sized("llama3-8b", SPLIT, "nodes=auto", "budget={gpu_hours: 0.5, max_nodes: 4}")[1]
    assert plan.safe
    assert plan.beyond_budget is not None
    assert "GPU-hours of budget.gpu_hours: 0.5. No number of nodes up to 1024 does; nodes: " in plan.beyond_budget
    nearest, enough = plan.beyond_budget.rpartition("nodes: ")[2].rstrip(".").split(" would with budget.gpu_hours: ")
    assert sized("llama3-8b", SPLIT, f"nodes={nearest}", f"budget.gpu_hours={enough}")[1].good


def test_where_no_number_of_nodes_fits_the_nearest_is_shown_with_what_would() -> None:
    recipe, plan = sized(*LARGE, "nodes=auto", "budget.max_nodes=2")
    assert (plan.safe, recipe.nodes) == (False, 2)
    enough, _ = sized(*LARGE, "nodes=auto")
    assert plan.changes == {"nodes": enough.nodes, "budget.max_nodes": enough.nodes}
    with pytest.raises(NothingSafe, match=f"set nodes: {enough.nodes} "):
        refuse(plan)


FEWEST = "tensor: 1, pipeline: 1, virtual_pipeline: 1, micro_batch_size: 1, recompute: none, offload_optimizer: 0.0"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("quickstart", "training.global_batch_size=7"), "training.global_batch_size: 7 evenly"),
        (("llama3-8b", "layout={tensor: 3, data: 1, pipeline: 1, context: 1}", "model.num_attention_heads=24",
          "model.num_query_groups=8", "model.hidden_size=3072"), "as pinned"),
        (("llama3-8b", "training.sequence_length=1001", "layout={context: 2}"), "as pinned (context=2)"),
        (("llama3-8b", "training.sequence_length=1002", f"layout={{context: 2, {FEWEST}}}"), "[context-length]"),
    ],
)  # fmt: skip
def test_what_no_number_of_nodes_could_split_is_said_with_its_reason(overrides: tuple[str, ...], reason: str) -> None:
    with pytest.raises(UserError) as refused:
        sized(*overrides, "nodes=auto")
    assert refused.value.exit_code == 2
    assert "nodes: auto: no number of nodes up to 1024 has a legal layout" in str(refused.value)
    assert reason in str(refused.value)


def test_of_rules_that_refuse_on_any_number_of_nodes_the_one_that_no_other_size_satisfies_is_named() -> None:
    with pytest.raises(UserError, match=r"up to 2 .* on 1, no layout is legal: .*\[offload-optimizer-distributed\]"):
        sized("llama3-70b", "nodes=auto", "budget.max_nodes=2", "layout={offload_optimizer: 1.0, zero_stage: 0}")


def test_passing_over_numbers_that_cannot_hold_the_model_changes_no_answer() -> None:
    setting = gallery_setting(*LARGE)
    nodes = smallest_cluster(setting, 2, 260).nodes
    assert nodes is not None
    safe = fewest_safe(setting, 1, 260, candidates=1e9)
    assert safe is not None
    assert (safe.nodes, safe.fewest) == (nodes, True)


def test_the_length_of_a_job_is_its_steps() -> None:
    recipe, plan = sized("llama3-8b", SPLIT)
    length = plan.length
    assert length == JobLength.of(recipe, plan.chosen.step_seconds)
    assert (length.steps, length.tokens) == (1000, 1000 * 512 * 8192)
    assert length.seconds == pytest.approx(1000 * plan.chosen.step_seconds)
    assert length.gpu_hours == pytest.approx(length.seconds * 32 / 3600)


@pytest.mark.parametrize(
    ("limit", "hours"),
    [
        ("90", 1.5),
        (90, 1.5),
        ("90:30", 181 / 120),
        ("1:30:00", 1.5),
        ("2-0", 48),
        ("2-1:30", 49.5),
        ("1-0:0:36", 24.01),
    ],
)
def test_slurms_time_limit_is_read_as_slurm_does(limit: str | int, hours: float) -> None:
    recipe = replace(recipe_of("llama3-8b"), slurm={"time": limit})
    assert time_limit_note(recipe, JobLength.of(recipe, hours * 3.599)) == ()
    (note,) = time_limit_note(recipe, JobLength.of(recipe, hours * 3.601))
    assert "slurm.time" in note
    assert "training.save_interval" in note


@pytest.mark.parametrize("limit", [None, False, "UNLIMITED", "0", 0, "soon"])
def test_no_limit_ends_no_job(limit: str | int | None) -> None:
    recipe = replace(recipe_of("llama3-8b"), slurm={} if limit is None else {"time": limit})
    assert time_limit_note(recipe, JobLength.of(recipe, 1e6)) == ()
