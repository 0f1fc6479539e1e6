"""What a step-time model must get right before its numbers are worth comparing; of the update: on which links gradients
and parameters travel, how often, and what hides them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from timed_jobs import BASE, FACTS, H100, LLAMA, MIXTRAL, WORK, alternating, job, term, time_of, total

from llmlaunch.cluster.profile import Link
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, Layout, LayoutColumns
from llmlaunch.memory.job import all_ranks
from llmlaunch.memory.weights import rank_parameters
from llmlaunch.techniques import Techniques
from llmlaunch.techniques.requests import Adapters
from llmlaunch.timing.arithmetic import token_flops
from llmlaunch.timing.passes import PIECE, pass_seconds
from llmlaunch.timing.products import constant
from llmlaunch.timing.step import combined, rank_alone_seconds, step_time, update_seconds
from llmlaunch.workload import Workload
from support.changed_facts import changed
from support.soak import examples

SHAPES = {"dense": LLAMA, "mixture": MIXTRAL, "alternating": alternating()}


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    power = st.sampled_from([1, 2, 4, 8])
    pipeline = draw(power)
    tensor = draw(power)
    return Layout(
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=draw(st.sampled_from([1, 2])) if pipeline > 1 else 1,
        context=draw(st.sampled_from([1, 2, 4])),
        data=draw(power),
        expert=1,
        micro_batch_size=draw(st.sampled_from([1, 2, 4])),
        sequence_parallel=draw(st.integers(0, 1)) if tensor > 1 else 0,
        zero_stage=draw(st.integers(0, 3)),
        recompute=draw(st.integers(0, 2)),
    )


@examples(8, 2000)
@given(layouts(), st.sampled_from(sorted(SHAPES)))
def test_terms_are_never_negative_and_sum_to_the_total(layout: Layout, shape: str) -> None:
    times = time_of(layout, job(SHAPES[shape]))
    assert all(column[0] >= 0 for column in times.terms.values())
    assert sum(float(column[0]) for column in times.terms.values()) == pytest.approx(float(times.total[0]), rel=1e-9)


@examples(8, 2000)
@given(st.lists(layouts(), min_size=1, max_size=6), st.sampled_from(sorted(SHAPES)))
def test_many_layouts_take_what_each_takes_alone(rows: list[Layout], shape: str) -> None:
    of = job(SHAPES[shape])
    together = step_time(of, H100, LayoutColumns.of(rows)).total
    assert together == pytest.approx([total(row, of) for row in rows], rel=1e-12)


def test_halves_equal_the_whole_however_many_layouts() -> None:
    rows = LayoutColumns.of([replace(BASE, zero_stage=i % 2, micro_batch_size=1 + i % 2) for i in range(PIECE + 3)])
    parts = pass_seconds(job(), H100, rows), update_seconds(job(), H100, rows)
    whole = step_time(job(), H100, rows)
    assert np.array_equal(combined(*parts).total, whole.total)
    assert np.sum(list(whole.terms.values()), axis=0) == pytest.approx(whole.total)


@pytest.mark.parametrize("other", [{"gradient_bytes": 2.0}, {"optimizer_bytes": 4.0}])
def test_passes_do_not_depend_on_how_gradients_and_states_are_kept(other: dict[str, float]) -> None:
    columns = LayoutColumns.of([BASE])
    other_job = replace(job(), facts=changed(FACTS, **other), techniques=Techniques(offload_optimizer=1.0))
    plain = pass_seconds(job(), H100, columns).total
    assert pass_seconds(other_job, H100, columns).total == plain
    assert pass_seconds(job(), H100, LayoutColumns.of([replace(BASE, zero_stage=3)])).total == plain


@examples(8, 2000)
@given(layouts())
def test_more_bandwidth_is_never_slower(layout: Layout) -> None:
    for link in ("node_link", "domain_link", "fabric_link"):
        nominal = getattr(H100, link)
        wider = replace(H100, **{link: Link(2 * nominal.bytes_per_second, nominal.latency_seconds)})
        assert total(layout, cluster=wider) <= total(layout) * (1 + 1e-12)
    faster = replace(H100.accelerator, memory_bytes_per_second=2 * H100.accelerator.memory_bytes_per_second)
    assert total(layout, cluster=replace(H100, accelerator=faster)) < total(layout)


@examples(8, 2000)
@given(layouts())
def test_one_micro_batch_more_is_never_faster(layout: Layout) -> None:
    each = layout.data * layout.micro_batch_size
    few, more = (total(layout, job(work=Workload(8192, each * count))) for count in (8, 9))
    assert few < more


def test_recompute_by_block_costs_its_share_of_the_layers() -> None:
    of = job(techniques=Techniques(recompute_method="block"))
    full = replace(BASE, recompute=RECOMPUTE_FULL)
    quarter = term("recompute", replace(full, recompute_layers=4), of)  # of the 16 of each stage
    assert quarter == pytest.approx(term("recompute", full, of) / 4)
    assert term("recompute", replace(full, recompute_layers=99), of) == pytest.approx(term("recompute", full, of))


def test_selective_recompute_costs_what_it_names() -> None:
    some = replace(BASE, recompute=RECOMPUTE_SELECTIVE)
    attention = term("recompute", some)
    both = term("recompute", some, job(techniques=Techniques(recompute_modules=("core_attn", "mlp"))))
    full = term("recompute", replace(BASE, recompute=RECOMPUTE_FULL))
    assert 0 < attention < both < full
    assert attention < 0.4 * term("attention", BASE)


def test_interleaving_shrinks_the_bubble() -> None:
    plain = replace(BASE, pipeline=4, data=4)
    halved = term("pipeline_bubble", replace(plain, virtual_pipeline=2))
    assert halved == pytest.approx(term("pipeline_bubble", plain) / 2)


@examples(8, 2000)
@given(layouts())
def test_nothing_runs_faster_than_the_hardware(layout: Layout) -> None:
    flops = token_flops(LLAMA, WORK.sequence_length).total * WORK.tokens_per_step
    peak = H100.accelerator.flops_per_second["bf16"] * layout.world_size
    assert flops / total(layout) < 0.75 * peak


def test_uneven_stages_wait_for_the_slowest() -> None:
    even = replace(BASE, layers_by_stage=(16, 16))
    assert total(even) == pytest.approx(total(BASE))
    assert total(replace(BASE, layers_by_stage=(17, 15))) < total(BASE)  # the head is worth about two layers
    assert total(replace(BASE, layers_by_stage=(20, 12))) > total(BASE)


def test_an_alternating_stack_is_as_slow_as_its_slowest_stage() -> None:
    shape = alternating()
    assert shape.moe is not None
    wide = replace(shape.moe, ffn_hidden_size=14336)
    mixed, lopsided = (
        total(BASE, job(replace(shape, moe=replace(wide, layer_pattern=pattern))))
        for pattern in ((0, 1) * 16, (0,) * 16 + (1,) * 16)
    )
    assert lopsided > 1.1 * mixed


def test_frozen_weights_have_no_gradient() -> None:
    adapters = job(techniques=Techniques(adapters=Adapters(rank=16)))
    share = term("matrix_products", BASE, adapters) / term("matrix_products", BASE)
    assert 2 / 3 < share < 0.75  # two of three products, and those of the adapters
    assert term("optimizer", BASE, adapters) < 0.05 * term("optimizer", BASE)


def test_masks_made_by_the_loader_set_a_floor() -> None:
    masked = replace(job(), facts=replace(FACTS, host=replace(FACTS.host, loader_mask=True)))
    wide = replace(BASE, tensor=8, pipeline=4, data=1)
    assert term("data_loading", replace(BASE, tensor=1, pipeline=1, data=32), masked) == 0
    assert total(wide, masked) > total(wide)
    short = replace(masked, workload=Workload(2048, 512))
    assert term("data_loading", wide, short) == 0


WIDE = replace(BASE, tensor=1, pipeline=1, data=32)


def test_gradients_travel_over_data_and_context_at_their_width() -> None:
    parameters = float(rank_parameters(job(), all_ranks(job(), LayoutColumns.of([WIDE]))).dense[0])
    bandwidth = min(constant("fabric_efficiency") * 50e9 * 8, constant("nvlink_efficiency") * 450e9)
    expected = 4.0 * parameters * 31 / 32 / bandwidth
    for layout in (WIDE, replace(WIDE, context=2, data=16)):
        seconds = update_seconds(job(), H100, LayoutColumns.of([layout]))
        assert seconds.reduce_seconds[0] == pytest.approx(expected, rel=0.01)
        assert seconds.gather_seconds[0] == pytest.approx(expected / 2, rel=0.02)
    narrow = replace(job(), facts=changed(FACTS, gradient_bytes=2.0))
    assert update_seconds(narrow, H100, LayoutColumns.of([WIDE])).reduce_seconds[0] == pytest.approx(
        expected / 2, rel=0.02
    )


def test_each_stage_of_zero_does_what_it_says() -> None:
    rows = LayoutColumns.of([replace(WIDE, zero_stage=stage) for stage in range(4)])
    seconds = update_seconds(job(), H100, rows)
    assert seconds.reduce_seconds[0] == pytest.approx(2 * seconds.reduce_seconds[1])
    assert seconds.gather_seconds[0] == 0 < seconds.gather_seconds[1]
    assert seconds.optimizer_seconds[0] == pytest.approx(32 * seconds.optimizer_seconds[1])
    assert list(seconds.reduce_overlapped) == list(seconds.gather_overlapped) == [False, True, True, True]
    assert list(seconds.reduce_each) == [False, False, True, True]
    assert list(seconds.gather_each) == [False, False, False, True]


def test_several_optimizers_scatter_and_gather_each_for_itself_and_all_reduce_their_shards() -> None:
    """Four of them in 32 devices, each in a node: parameters stay inside it, shards of an eighth travel between."""
    four, layouts = replace(job(), facts=changed(FACTS, optimizer_instances=4)), LayoutColumns.of([WIDE])
    one_update, four_updates = (update_seconds(each, H100, layouts) for each in (job(), four))
    parameters = float(rank_parameters(job(), all_ranks(job(), layouts)).dense[0])
    nvlink = constant("nvlink_efficiency") * 450e9
    assert four_updates.gather_seconds[0] == pytest.approx(2.0 * parameters * 7 / 8 / nvlink, rel=0.02)
    fabric = constant("fabric_efficiency") * 50e9  # the member of each node, alone with its adapter
    between = 2 * 4.0 * parameters / 8 * 3 / 4 / fabric
    assert four_updates.reduce_seconds[0] == pytest.approx(4.0 * parameters * 7 / 8 / nvlink + between, rel=0.02)
    assert four_updates.optimizer_seconds[0] == pytest.approx(4 * one_update.optimizer_seconds[0])


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


@pytest.mark.parametrize("layout", [replace(BASE, pipeline=1), replace(BASE, tensor=4, pipeline=4)])
def test_a_rank_alone_computes_its_part_of_the_step_and_waits_for_nobody(layout: Layout) -> None:
    step, count = time_of(layout), layout.num_microbatches(WORK.global_batch_size)
    alone = [rank_alone_seconds(job(), H100, layout, rank, count) for rank in range(layout.pipeline)]
    kinds = {name: float(column[0]) for name, column in step.terms.items()}
    computed = sum(kinds[name] for name in ("matrix_products", "attention", "element_wise", "kernel_launches"))
    assert max(alone) == pytest.approx(computed + kinds["optimizer"])  # the slowest stage is what `terms` show
    assert max(alone) < float(step.total[0])
    assert len(set(alone[1:-1])) <= 1
