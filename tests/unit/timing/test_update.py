"""Gradients reduced, parameters gathered, states updated: on which links, how often, and what hides them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from timed_jobs import BASE, FACTS, H100, MIXTRAL, job, term, total

from llmlaunch.layout import RECOMPUTE_FULL, Layout, LayoutColumns
from llmlaunch.memory.job import all_ranks
from llmlaunch.memory.weights import rank_parameters
from llmlaunch.techniques import Techniques
from llmlaunch.timing.constants import constant
from llmlaunch.timing.network import links
from llmlaunch.timing.step import update_seconds
from llmlaunch.workload import Workload

WIDE = replace(BASE, tensor=1, pipeline=1, data=32)


def test_gradients_travel_over_data_and_context_at_their_width() -> None:
    parameters = float(rank_parameters(job(), all_ranks(job(), LayoutColumns.of([WIDE]))).dense[0])
    bandwidth = min(constant("fabric_efficiency") * 50e9 * 8, constant("nvlink_efficiency") * 450e9)
    expected = 4.0 * parameters * 31 / 32 / bandwidth
    for layout in (WIDE, replace(WIDE, context=2, data=16)):
        seconds = update_seconds(job(), H100, LayoutColumns.of([layout]))
        assert seconds.reduce_seconds[0] == pytest.approx(expected, rel=0.01)
        assert seconds.gather_seconds[0] == pytest.approx(expected / 2, rel=0.02)
    narrow = replace(job(), facts=replace(FACTS, gradient_bytes=2.0))
    assert update_seconds(narrow, H100, LayoutColumns.of([WIDE])).reduce_seconds[0] == pytest.approx(
        expected / 2, rel=0.02
    )


def test_experts_travel_over_their_own_data_parallelism() -> None:
    seconds = [
        float(update_seconds(job(MIXTRAL), H100, LayoutColumns.of([replace(WIDE, expert=e)])).reduce_seconds[0])
        for e in (1, 8)
    ]
    assert seconds[1] < seconds[0]
    members = links(H100, np.array([4.0]), np.array([8.0]))  # of 32 devices, four hold the same experts
    mine = float(rank_parameters(job(MIXTRAL), all_ranks(job(MIXTRAL), LayoutColumns.of([WIDE]))).expert[0]) / 8
    assert seconds[1] > 4.0 * mine * 0.75 / members.bytes_per_second[0]


def test_each_stage_of_zero_does_what_it_says() -> None:
    rows = LayoutColumns.of([replace(WIDE, zero_stage=stage) for stage in range(4)])
    seconds = update_seconds(job(), H100, rows)
    assert seconds.reduce_seconds[0] == pytest.approx(2 * seconds.reduce_seconds[1])
    assert seconds.gather_seconds[0] == 0 < seconds.gather_seconds[1]
    assert seconds.optimizer_seconds[0] == pytest.approx(32 * seconds.optimizer_seconds[1])
    assert list(seconds.overlapped) == [False, True, True, True]
    assert list(seconds.reduce_each) == [False, False, True, True]
    assert list(seconds.gather_each) == [False, False, False, True]


def test_longer_passes_hide_more_of_the_transfers() -> None:
    few = job(work=Workload(512, 64))
    short, long = (term("data_parallel", replace(WIDE, micro_batch_size=b), few) for b in (1, 2))
    assert long < short
    assert term("data_parallel", replace(WIDE, zero_stage=0), few) > short
    chunks = replace(WIDE, pipeline=4, data=8)
    assert term("data_parallel", replace(chunks, virtual_pipeline=2), few) < term("data_parallel", chunks, few)


def test_zero_3_pays_for_every_micro_batch() -> None:
    many, few = (job(work=Workload(512, 32 * count)) for count in (8, 1))
    sharded = replace(WIDE, zero_stage=3)
    assert term("data_parallel", sharded, many) > 6 * term("data_parallel", sharded, few)


def test_an_optimizer_on_the_host_is_slower_by_its_share() -> None:
    here, half, there = (
        term("optimizer", BASE, job(techniques=Techniques(offload_optimizer=share))) for share in (0.0, 0.5, 1.0)
    )
    assert here < half < there
    assert half == pytest.approx((here + there) / 2)


def test_activations_on_the_host_cost_a_share_of_their_way_while_their_layer_computes_longer() -> None:
    whole = replace(BASE, offload_layers=16)
    short, long = (job(work=Workload(length, 2**23 // length)) for length in (1024, 2**20))
    assert term("host_transfers", BASE) == 0
    # the same tokens travel, in few long micro-batches or in many short ones
    assert term("host_transfers", whole, short) > 2 * term("host_transfers", whole, long) > 0


@pytest.mark.parametrize("modules", [("core_attn",), ("core_attn", "attn_proj", "qkv_linear")])
def test_offloaded_modules_never_make_a_step_faster(modules: tuple[str, ...]) -> None:
    assert total(BASE, job(techniques=Techniques(offload_modules=modules))) >= total(BASE)


def test_checkpoints_on_the_host_move_only_with_full_recompute() -> None:
    moved = job(work=Workload(512, 512), techniques=Techniques(offload_checkpoints=True))
    assert term("host_transfers", BASE, moved) == 0
    assert term("host_transfers", replace(BASE, recompute=RECOMPUTE_FULL), moved) >= 0


def test_an_update_can_be_taken_row_by_row() -> None:
    rows = LayoutColumns.of([WIDE, replace(WIDE, zero_stage=0), Layout(data=32, tensor=2)])
    whole = update_seconds(job(), H100, rows)
    again = whole.take(np.array([2, 0]))
    assert again.reduce_seconds[0] == whole.reduce_seconds[2]
    assert again.gather_seconds[1] == whole.gather_seconds[0]
