"""What-ifs gain time as well as they cost memory: pipelines without flushes, weight gradients in the bubble."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timed_jobs import H100, LLAMA, MIXTRAL, alternating, job, term, time_of, total

from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.job import Job
from llmlaunch.models.shape import ModelShape
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.timing.products import split_of
from llmlaunch.timing.stages import pieces
from llmlaunch.workload import Workload

DEEP = Layout(2, 8, data=4, sequence_parallel=1, zero_stage=1)
FEW = Workload(8192, 64)  # 16 micro-batches
LAYOUTS = st.builds(
    Layout,
    tensor=st.sampled_from([1, 4]),
    pipeline=st.sampled_from([1, 2, 8]),
    virtual_pipeline=st.sampled_from([1, 2]),
    data=st.sampled_from([1, 8]),
    sequence_parallel=st.just(1),
    zero_stage=st.sampled_from([0, 1]),
    recompute=st.sampled_from([0, 2]),
)


def few(techniques: Techniques = NO_TECHNIQUES, work: Workload = FEW) -> Job:
    return job(work=work, techniques=techniques)


@settings(max_examples=20)
@given(LAYOUTS, st.sampled_from([Techniques(weight_versions=2), Techniques(zero_bubble=True)]))
def test_no_what_if_of_a_pipeline_makes_a_step_longer(layout: Layout, what_if: Techniques) -> None:
    assert total(layout, few(what_if)) <= total(layout, few())


def test_two_versions_of_the_weights_leave_no_bubble_and_hide_the_gradients() -> None:
    twice = few(Techniques(weight_versions=2))
    assert term("pipeline_bubble", DEEP, few()) > 0.0
    assert term("pipeline_bubble", DEEP, twice) == 0.0
    assert term("data_parallel", replace(DEEP, zero_stage=0), twice) < term(
        "data_parallel", replace(DEEP, zero_stage=0), few()
    )
    one_stage = replace(DEEP, pipeline=1)
    assert total(one_stage, twice) == total(one_stage, few())


def test_two_versions_take_the_longer_of_computation_and_gradients() -> None:
    """PipeDream-2BW, section 3.3, but for what hidden communication takes of the device."""
    work = replace(FEW, global_batch_size=8)
    slow = replace(H100, fabric_link=replace(H100.fabric_link, bytes_per_second=1e8))
    layout = Layout(4, 2, data=8, sequence_parallel=1, zero_stage=0)
    step = time_of(layout, few(Techniques(weight_versions=2), work), slow)
    plain = time_of(layout, few(work=work), slow)
    gradients = float(plain.data_parallel[0])  # nothing hides them
    computed = float((step.passes.microbatches * (step.passes.hiding_forward + step.passes.hiding_backward))[0])
    assert gradients > 4 * computed
    assert float(step.data_parallel[0]) > gradients - computed
    assert float(step.total[0]) < float(plain.total[0])


def test_weight_gradients_in_the_bubble_take_twice_their_seconds_out_of_it() -> None:
    layer = pieces(few(), H100, split_of(few(), LayoutColumns.of([DEEP]))).layers[0]
    weights = float((layer.linears.backward - layer.linears.forward)[0])
    spared = term("pipeline_bubble", DEEP, few()) - term("pipeline_bubble", DEEP, few(Techniques(zero_bubble=True)))
    assert spared == pytest.approx(2 * (LLAMA.num_layers - LLAMA.num_layers // 8) * weights)
    chunks = replace(DEEP, virtual_pipeline=2)
    assert total(chunks, few(Techniques(zero_bubble=True))) == total(chunks, few())


@pytest.mark.parametrize("shape", [LLAMA, MIXTRAL, alternating()], ids=["dense", "mixture", "alternating"])
@pytest.mark.parametrize("layout", [Layout(2, data=16, sequence_parallel=1, zero_stage=1, recompute=2), DEEP])
def test_each_layer_more_that_is_trained_takes_its_backward_pass(shape: ModelShape, layout: Layout) -> None:
    steps = [total(layout, job(shape, techniques=Techniques(trained_layers=n))) for n in (1, 8, 16, 24, 32)]
    assert steps == sorted(steps)
    every = total(layout, job(shape))
    # the embedding is not trained
    assert steps[-1] == pytest.approx(every, rel=2e-3)
    assert steps[-1] <= every
    assert steps[0] > every / 5 if layout is DEEP else steps[0] > every / 4.5


def test_frozen_layers_run_forward_alone() -> None:
    layout = Layout(2, data=16, sequence_parallel=1, zero_stage=1)
    half, every = (job(techniques=Techniques(trained_layers=n)) for n in (16, 32))
    parts = pieces(half, H100, split_of(half, LayoutColumns.of([layout])))
    below, whole = parts.frozen[0], parts.layers[0]
    assert float(sum(below.kinds.values())[0]) == pytest.approx(float(below.seconds[0]))  # type: ignore[index]
    microbatches = time_of(layout, half).passes.microbatches[0]
    spared = 16 * microbatches * float((whole.seconds - below.seconds)[0])
    stragglers = term("stragglers", layout, every) - term("stragglers", layout, half)
    rest = term("data_parallel", layout, every) - term("data_parallel", layout, half)
    rest += term("optimizer", layout, every) - term("optimizer", layout, half)
    assert total(layout, every) - total(layout, half) == pytest.approx(spared + stragglers + rest)
    step = time_of(layout, half)
    assert float(sum(step.terms.values())[0]) == pytest.approx(float(step.total[0]))  # type: ignore[index]


def test_stages_below_all_that_is_trained_idle_in_the_backward_pass() -> None:
    layout = Layout(2, 4, data=8, sequence_parallel=1, zero_stage=1)
    last_stage, every = (job(techniques=Techniques(trained_layers=n)) for n in (8, 32))
    assert term("matrix_products", layout, last_stage) == term("matrix_products", layout, every)
    assert term("pipeline_bubble", layout, last_stage) < term("pipeline_bubble", layout, every) / 2
    below = job(techniques=Techniques(trained_layers=4))
    assert term("attention", layout, below) < 0.7 * term("attention", layout, every)


@pytest.mark.parametrize("experts", [2, 4, 8])
def test_weight_gradients_apart_hide_no_less_of_the_exchange(experts: int) -> None:
    layout = Layout(data=16, expert=experts, zero_stage=1)
    switches = [
        NO_TECHNIQUES,
        Techniques(overlap_expert_communication=True),
        Techniques(overlap_expert_communication=True, delay_weight_gradients=True),
        Techniques(delay_weight_gradients=True),  # which asks Megatron-LM for the overlap, too
    ]
    exchange = [term("expert_parallel", layout, job(MIXTRAL, techniques=each)) for each in switches]
    assert exchange[0] > exchange[1] >= exchange[2] == exchange[3]
