"""A margin rests on runs that are like the plan, each configuration once, and says how many they are."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest

from llmlaunch.calibration.lessons import RatioBound
from llmlaunch.calibration.peaks import scores_of_records
from llmlaunch.calibration.ratios import RunClass, ratio_bound
from llmlaunch.cluster.cards import machines
from support.measured_runs import CARD, run

CLUSTERS = machines()
H100 = CLUSTERS["h100-80gb"].accelerator.name
RATIOS = [0.90 + i / 100 for i in range(20)]


def margin(records: list[dict[str, Any]], risk: float = 0.05, version: str | None = None) -> RatioBound:
    scores = scores_of_records(records, CLUSTERS, "megatron", H100)
    return ratio_bound(scores, RunClass(H100, "dense gated", version), risk)


def measured(kind: str = "device") -> list[dict[str, Any]]:
    return [run(i, ratio, kind) for i, ratio in enumerate(RATIOS)]


@cache
def usual() -> RatioBound:
    return margin(measured())


@pytest.mark.parametrize(
    "changed",
    [
        {"backend": "deepspeed"},
        {"gpu": "A100"},
        {"flags_known": False},
        {"run_state": "running"},
        {"run_state": "failed"},
        {"source": {"evidence": "failed"}},
        {"peak_kind": "allocated"},
        {"peak_kind": "fits", "peak_bytes": None},
        {"gpu_memory_bytes": 2**20},  # predicted above its own card: no plan is ever there
        {"recipe": {}},  # imported, and no measurement record at all
        {"observed": {"steps_run": 1}},
        {"observed": {"baseline_bytes": CARD // 4}},  # others were on the card before the trainer
        {"observed": {"device_peak_bytes": CARD, "process_peak_bytes": 2**30, "device_total_bytes": CARD}},
    ],
)
def test_what_is_not_comparable_does_not_count(changed: dict[str, Any]) -> None:
    strangers = [{**copy.deepcopy(run(100 + i, 3.0)), **changed} for i in range(4)]
    assert margin([*measured(), *strangers]) == usual()


def test_what_was_observed_of_a_run_that_counts_does_not_matter() -> None:
    observed = {"steps_run": 2, "baseline_bytes": 2**29}
    observed |= {"device_peak_bytes": CARD // 2, "process_peak_bytes": CARD // 2}
    assert margin([{**record, "observed": observed} for record in measured()]) == usual()
    brief = {**run(99, None), "observed": {"steps_run": 0}}
    assert margin([*measured(), brief]).ratio is None, "a death needs no second step"


def test_configurations_that_offload_differently_are_two_runs() -> None:
    offloading = [
        {**record, "layout": {**record["layout"], "offload_layers": n}} for record in measured() for n in (1, 2)
    ]
    assert margin([{**record, "id": f"{record['id']}-{i}"} for i, record in enumerate(offloading)]).runs == 40


def test_repeats_and_ranks_of_one_configuration_are_one_run_the_worst() -> None:
    again = [
        {**record, "id": f"{record['id']}-{n}", "peak_bytes": record["peak_bytes"] + n}
        for record in measured()
        for n in range(4)
    ]
    result = margin(again)
    assert result.runs == 20
    assert result.ratio is not None
    assert result.ratio > (usual().ratio or 0)


def test_a_death_is_never_forgotten() -> None:
    assert margin([*measured(), run(99, None)]).ratio is None  # one in twenty-one is more than one in twenty
    many = [run(i, 1.0) for i in range(60)]
    assert margin([*many, run(99, None)]).ratio is not None
    filled = {**run(99, 1.0), "run_state": "failed", "peak_bytes": CARD - 2**30}
    assert margin([*measured(), filled]).ratio is None


def test_a_run_of_our_own_that_ran_out_counts_unless_a_neighbour_or_the_program_set_the_limit() -> None:
    own = {**run(99, None), "run_state": "failed"}
    numbers = {"asked_bytes": 2**30, "total_bytes": CARD, "process_bytes": CARD - 2**30, "other_processes_bytes": 2**28}
    assert margin([*measured(), {**own, "numbers": numbers}]).ratio is None
    for other in (
        {**own, "numbers": {**numbers, "other_processes_bytes": CARD // 4}},
        {**own, "numbers": {**numbers, "allowed_bytes": CARD // 2}},
        {**own, "peak_kind": "host_oom"},
    ):
        assert margin([*measured(), other]).ratio is not None
