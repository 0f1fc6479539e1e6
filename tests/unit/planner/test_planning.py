"""The planner searches everything, refuses with exactly one reason, and never calls an overflow safe."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from llmlaunch.calibration.lessons import Lessons, RatioBound
from llmlaunch.calibration.margins import device_margin, host_margin
from llmlaunch.cluster.matrix import BandwidthMatrix
from llmlaunch.errors import NothingSafe, UserError
from llmlaunch.planner.plan import Plan
from llmlaunch.planner.plan_json import plan_json
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.refusal import explain_unsafe
from llmlaunch.units import GIB
from support.plans import plan_of, setting_for
from support.recipes import recipe_of

FEW = "layout={tensor: [1, 2], context: 1, micro_batch_size: 1}"
ASKED = "layout.techniques=asked"


def test_the_70b_recipe_is_safe_as_it_ships() -> None:
    plan = plan_of("llama3-70b")
    assert plan.safe
    assert plan.layout.world_size == 512
    assert plan.estimate.worst.device_bytes == plan.chosen.device_bytes <= plan.limit.limit_bytes
    assert 0.8 * plan.limit.memory_bytes < plan.limit.limit_bytes < plan.limit.fits_bytes == plan.limit.memory_bytes
    assert plan.limit.runs > 100
    assert sum(plan.step_terms.values()) == pytest.approx(plan.chosen.step_seconds)


def test_pins_narrow_the_space_and_are_kept() -> None:
    plan = plan_of("llama3-70b", "layout={tensor: 8, pipeline: [2, 4], recompute: full}")
    assert plan.layout.tensor == 8
    assert plan.layout.pipeline in (2, 4)
    assert plan.layout.as_json()["recompute"] == "full"


def test_nothing_safe_says_the_closest_layout_its_rank_and_term_and_what_would_fit() -> None:
    plan = plan_of("llama3-70b", "nodes=1", "layout={offload_optimizer: 0, techniques: asked}")
    assert not plan.safe
    failure = explain_unsafe(plan)
    assert isinstance(failure, NothingSafe)
    assert failure.exit_code == 3
    message = str(failure)
    assert plan.layout.describe() in message
    assert "pipeline rank 0" in message
    assert "optimizer_states" in message
    assert "Smallest change that is safe: " in message
    assert "\n" not in message


def test_a_small_card_keeps_a_fixed_floor_free() -> None:
    recipe = recipe_of("llama3-8b", "cluster=a100-40gb-x8", "memory.limit=0.95", "memory.floor_gib=4")
    limit = device_margin(recipe)
    assert limit.limit_bytes == recipe.cluster.accelerator.memory_bytes - 4 * GIB
    assert "stay free" in limit.reason


def test_without_enough_runs_of_its_own_a_store_leaves_it_to_the_shipped_ones() -> None:
    recipe = recipe_of("llama3-8b", "memory.risk=0.05")
    limit = device_margin(recipe, Lessons(bound=RatioBound(3, None, "too few runs")))
    assert limit == device_margin(recipe)
    assert limit.risk == 0.05
    assert limit.limit_bytes < device_margin(recipe_of("llama3-8b", "memory.risk=0.2")).limit_bytes
    assert f"{limit.runs} measured megatron runs of dense models in 16 bits" in limit.reason


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("memory.limit=0.8",), "80% of device memory"),
        (("memory.risk=0.0001",), "risk 0.0001 needs 19998 measured runs: 80% of device memory"),
        (
            ("cluster={base: a100-40gb-x8, accelerator: v100-32gb}",),
            "no measured run is of a card like v100-32gb: 80% of device memory",
        ),
    ],
)
def test_fujiis_rule_decides_where_it_is_asked_for_and_where_no_run_can(
    overrides: tuple[str, ...], reason: str
) -> None:
    recipe = recipe_of("llama3-8b", *overrides)
    limit = device_margin(recipe)
    assert limit.limit_bytes == int(0.8 * recipe.cluster.accelerator.memory_bytes)
    assert limit.reason == f"{reason}, the 80 % rule of Fujii et al."


@pytest.mark.parametrize(("ratio", "share"), [(1.25, 0.8), (1.05, 1 / 1.05), (0.9, 1.0)])
def test_with_enough_runs_of_its_own_a_store_decides_and_the_floor_stays_free(ratio: float, share: float) -> None:
    recipe = recipe_of("llama3-8b", "memory={risk: 0.05, floor_gib: 2}")
    bound = RatioBound(30, ratio, "risk 0.05 by 30 comparable runs")
    memory = recipe.cluster.accelerator.memory_bytes
    limit = device_margin(recipe, Lessons(bound=bound))
    assert limit.limit_bytes == int(memory * share - 2 * GIB)
    assert limit.limit_bytes <= memory
    assert limit.reason.startswith(bound.sentence)
    assert (limit.risk, limit.runs) == (0.05, 30)


def test_measured_runs_change_nothing_where_the_recipe_names_a_share() -> None:
    recipe = recipe_of("llama3-8b", "memory.limit=0.8")
    bound = RatioBound(30, 1.01, "risk 0.05 by 30 comparable runs")
    assert device_margin(recipe, Lessons(bound=bound)) == device_margin(recipe)


def test_a_store_whose_runs_are_of_other_kinds_never_allows_more_than_the_shipped_runs() -> None:
    recipe = recipe_of("llama3-8b")
    bound = RatioBound(30, 1.01, "risk 0.1 by 30 comparable runs", widened="no run is of a dense gated model")
    assert device_margin(recipe, Lessons(bound=bound)).limit_bytes == device_margin(recipe).limit_bytes
    tighter = RatioBound(30, 1.3, "risk 0.1 by 30 comparable runs", widened="no run is of a dense gated model")
    assert device_margin(recipe, Lessons(bound=tighter)).limit_bytes < device_margin(recipe).limit_bytes


def test_host_memory_refuses_with_the_term_and_the_way_out() -> None:
    plan = plan_of("llama3-8b", "slurm.mem=20G", ASKED)
    assert not plan.safe
    assert set(plan.refused) >= {"host_memory"}
    message = str(explain_unsafe(plan))
    assert "not the host memory" in message
    assert "80% of slurm.mem (20 GiB)" in message
    assert "most of it processes" in message
    assert "Smallest change that is safe: set slurm.mem: 0 (from 20G)" in message


def test_a_host_that_is_large_enough_changes_nothing() -> None:
    assert plan_of("llama3-8b", FEW).layout == plan_of("llama3-8b", FEW, "slurm.mem=400G").layout


@pytest.mark.parametrize(
    ("wanted", "gib"),
    [
        ("mem=512000", 500),
        ("mem=480G", 480),
        ("mem=1T", 1024),
        ("mem=491520M", 480),
        ("mem=0", 2048),
        ("mem=9T", 2048),
        ("mem-per-gpu=64G", 8 * 64),
    ],
)
def test_slurms_units_and_the_nodes_own_memory_bound_the_host(wanted: str, gib: int) -> None:
    limit = host_margin(recipe_of("llama3-8b", f"slurm.{wanted}"))
    assert (limit.memory_bytes, limit.limit_bytes) == (gib * GIB, int(0.8 * gib * GIB))


def test_a_size_sbatch_does_not_know_is_refused() -> None:
    with pytest.raises(UserError, match=r"slurm.mem: 'lots' is no form that sbatch takes; write a whole number with K"):
        plan_of("llama3-8b", "slurm.mem=lots")


def test_on_a_cpu_the_host_holds_what_its_processes_do() -> None:
    plan = plan_of("quickstart")
    assert plan.estimate.host_bytes_per_node == 2 * plan.estimate.worst.device_bytes
    assert plan_json(plan)["memory"]["host_terms"]["processes"] == plan.estimate.host_bytes_per_node


def test_states_offloaded_beyond_the_host_are_taken_back() -> None:
    offload = ("nodes=1", f"{FEW[:-1]}, offload_optimizer: 1.0, zero_stage: 1, techniques: asked}}", "slurm.mem=0")
    plan = plan_of("llama3-8b", *offload, "cluster.base=h100-80gb-x8", "cluster.host_memory_gib=60")
    assert not plan.safe
    message = str(explain_unsafe(plan))
    assert "most of it offloaded_optimizer" in message
    assert "remove layout.offload_optimizer" in message


def test_on_a_cpu_the_host_is_the_device_and_offload_saves_nothing() -> None:
    plain, offloaded = (
        plan_of("quickstart", f"layout={{zero_stage: 3, offload_parameters: {away}, offload_optimizer: {share}}}")
        for away, share in (("false", "0.0"), ("true", "1.0"))
    )
    assert offloaded.estimate.worst.device_bytes == plain.estimate.worst.device_bytes


def test_the_plan_says_whether_swapping_is_hidden() -> None:
    sizes = "tensor: 4, pipeline: 1, context: 1, micro_batch_size: 1"
    pinned = f"layout={{{sizes}, recompute: none, techniques: asked, offload_optimizer: 0, zero_stage: 1}}"
    short, long = (
        plan_of("llama3-8b", pinned, f"training.sequence_length={length}", "what_if={swapped_share: 1.0}").assumptions
        for length in (2048, 262144)
    )
    assert "it is not hidden" in short[-1]
    # what the step time takes: eight share the memory
    assert "GB/s of the 37.5 that 16 lanes of PCIe 5.0 can carry" in short[-1]
    assert long[-1].endswith("it is hidden")
    assert plan_of("llama3-8b", pinned).assumptions == ()


NODES = 16


def plan_on(factor: float) -> Plan:
    """Llama 3 8B on sixteen nodes of four A100, whose links have the statistics of Pipette's published measurements
    (github.com/yimjinkyu1/date2024_pipette, vivaldi-master/time_0.json: 16.2 to 19.8 GB/s), times a factor."""
    chance = random.Random(0)
    speeds = tuple(tuple(factor * chance.uniform(16.2e9, 19.8e9) for _ in range(NODES)) for _ in range(NODES))
    training = ("training.sequence_length=2048", "training.global_batch_size=512")
    recipe = recipe_of("llama3-8b", "cluster=a100-80gb-x8", f"nodes={NODES}", "memory.limit=0.8", ASKED, *training)
    matrix = BandwidthMatrix(tuple(f"n{i:02}" for i in range(NODES)), speeds)
    cluster = replace(recipe.cluster, devices_per_node=4, nvlink_domain_devices=4, bandwidth=matrix)
    return make_plan(setting_for(replace(recipe, cluster=cluster, pins={}, preference=False)))


def test_a_slow_a_middling_and_a_fast_network_make_three_plans_and_a_slow_one_keeps_data_parallelism_small() -> None:
    slow, middling, fast = (plan_on(factor) for factor in (0.05, 0.5, 8.0))
    assert len({plan.layout for plan in (slow, middling, fast)}) == 3
    assert slow.chosen.step_seconds > middling.chosen.step_seconds >= fast.chosen.step_seconds
    assert slow.layout.data < fast.layout.data


def test_evaluations_are_part_of_the_jobs_length() -> None:
    """A batch of one takes a third of a step at most; one more is due after the last step."""
    evaluation = "training.evaluation={interval: 100, iterations: 30}"
    plain, evaluated = plan_of("llama3-8b", FEW), plan_of("llama3-8b", FEW, evaluation)
    times = evaluated.length.steps // 100 + 1
    assert evaluated.length.evaluation_seconds == pytest.approx(times * 30 / 3 * evaluated.chosen.step_seconds)
    assert evaluated.length.seconds == pytest.approx(plain.length.seconds + evaluated.length.evaluation_seconds)
    assert evaluated.chosen == plain.chosen
