"""What a step-time model must get right before its numbers are worth comparing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmlaunch.backends.facts.megatron import MegatronOptions, megatron_facts
from llmlaunch.calibration.accuracy import score
from llmlaunch.calibration.machines import clusters_by_gpu
from llmlaunch.cluster.load import load_cluster
from llmlaunch.layout import RECOMPUTE_FULL, Layout, LayoutColumns
from llmlaunch.memory.job import Job
from llmlaunch.models.presets import load_preset
from llmlaunch.timing.flops import model_flops_per_token
from llmlaunch.timing.step import StepTime, step_time
from llmlaunch.workload import Workload

FACTS = megatron_facts(MegatronOptions())
H100 = load_cluster("h100-80gb-x8")
LLAMA = load_preset("llama3-8b")
WORK = Workload(8192, 512)
BASE = Layout(2, 2, data=8, sequence_parallel=1, zero_stage=1)
DATA = Path(__file__).parents[2] / "data" / "measurements" / "outcomes.jsonl"


def time_of(layout: Layout, work: Workload = WORK) -> StepTime:
    return step_time(Job(LLAMA, work, FACTS), H100, LayoutColumns.of([layout]))


def total(layout: Layout, work: Workload = WORK) -> float:
    return float(time_of(layout, work).total[0])


def test_terms_are_never_negative_and_sum_to_the_total() -> None:
    times = time_of(BASE)
    assert all(column[0] >= 0 for column in times.terms.values())
    assert sum(float(column[0]) for column in times.terms.values()) == pytest.approx(float(times.total[0]))


def test_full_recompute_costs_about_a_third_more_compute() -> None:
    again = float(time_of(replace(BASE, recompute=RECOMPUTE_FULL)).terms["recompute"][0])
    kinds = ("matrix_products", "attention", "element_wise")
    compute = sum(float(time_of(BASE).terms[kind][0]) for kind in kinds)
    assert 0.25 < again / compute < 0.36


def test_interleaving_shrinks_the_bubble() -> None:
    plain = replace(BASE, pipeline=4, data=4)
    assert time_of(replace(plain, virtual_pipeline=2)).terms["pipeline_bubble"][0] == pytest.approx(
        time_of(plain).terms["pipeline_bubble"][0] / 2
    )


def test_a_larger_batch_takes_longer_and_wastes_less_on_the_bubble() -> None:
    double = replace(WORK, global_batch_size=1024)
    assert total(BASE, double) > total(BASE)
    share = [float(time_of(BASE, w).terms["pipeline_bubble"][0]) / total(BASE, w) for w in (WORK, double)]
    assert share[1] < share[0]


def test_nothing_runs_faster_than_the_hardware() -> None:
    flops = model_flops_per_token(LLAMA, WORK.sequence_length) * WORK.tokens_per_step
    peak = H100.accelerator.flops_per_second["bf16"] * BASE.world_size
    assert flops / total(BASE) < 0.75 * peak


def test_tensor_parallelism_across_nodes_is_slow() -> None:
    inside, across = replace(BASE, tensor=8, data=2), replace(BASE, tensor=16, data=1)
    assert time_of(across).terms["tensor_parallel"][0] > 3 * time_of(inside).terms["tensor_parallel"][0]


def test_the_fastest_measured_layouts_are_found_on_the_published_grid() -> None:
    """8B on 8 to 256 A100s: what we would choose loses at most 5 % of the best measured throughput."""
    clusters = clusters_by_gpu()
    grid: dict[int, list[tuple[float, float]]] = {}
    for line in DATA.read_text().splitlines():
        record = json.loads(line)
        if record["family"] != "fujii-grid-A100-40GB" or not record.get("tflops_per_gpu"):
            continue
        predicted = score(record, clusters).predicted_tokens_per_second_per_gpu
        assert predicted is not None
        grid.setdefault(record["world_size"], []).append((predicted, record["tflops_per_gpu"]))
    assert sorted(grid) == [8, 16, 32, 64, 128, 256]
    for size, rows in grid.items():
        predicted, measured = np.array(rows).T
        assert measured[predicted.argmax()] >= 0.95 * measured.max(), size
