"""Laws no memory estimate may break, over layouts drawn at random."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes import ALTERNATING, LLAMA2_7B, LLAMA3_8B, MIXTRAL

from llmlaunch.backends.deepspeed.facts import deepspeed_facts
from llmlaunch.backends.megatron.facts import megatron_facts
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.correction import NO_CORRECTION, Correction
from llmlaunch.memory.estimate import RankEstimate
from llmlaunch.memory.estimator import estimate, worst_ranks
from llmlaunch.memory.job import Job
from llmlaunch.models.shape import ModelShape
from llmlaunch.units import GIB
from llmlaunch.workload import Workload

FACTS = megatron_facts()
STATIC = ("parameters", "gradients", "optimizer_states")
SHAPES = st.sampled_from([LLAMA3_8B, LLAMA2_7B, MIXTRAL, ALTERNATING])
# what measured runs may add to a prediction, or take away
CORRECTIONS = st.one_of(
    st.just(NO_CORRECTION),
    st.builds(Correction, torch_share=st.floats(-0.9, 1.5), outside_bytes=st.floats(-3.0 * GIB, 8.0 * GIB)),
)


@st.composite
def layouts(draw: st.DrawFn, shape: ModelShape = LLAMA3_8B) -> Layout:
    tensor = draw(st.sampled_from([1, 2, 4, 8]))
    pipeline = draw(st.sampled_from([1, 2, 4, 8]))
    virtual = draw(st.sampled_from([1, 2, 4])) if pipeline > 1 else 1
    return Layout(
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=virtual,
        context=draw(st.sampled_from([1, 2, 4])),
        data=draw(st.sampled_from([1, 2, 8, 64])),
        expert=draw(st.sampled_from([1, 2, 8])) if shape.moe else 1,
        micro_batch_size=draw(st.sampled_from([1, 2, 4])),
        sequence_parallel=int(tensor > 1 and draw(st.booleans())),
        zero_stage=draw(st.sampled_from([0, 1, 2, 3])),
        recompute=draw(st.sampled_from([0, 1, 2])),
    )


def job_of(shape: ModelShape, layout: Layout, microbatches: int = 8, length: int = 4096) -> Job:
    return Job(shape, Workload(length, microbatches * layout.data * layout.micro_batch_size), FACTS)


def static(rank: RankEstimate) -> int:
    return sum(rank.terms[name] for name in STATIC)


@given(SHAPES, st.data())
def test_terms_are_never_negative_and_sum_to_the_device_bytes(shape: ModelShape, data: st.DataObject) -> None:
    layout = data.draw(layouts(shape))
    for rank in estimate(job_of(shape, layout), layout).ranks:
        assert min(rank.terms.values()) >= 0
        assert sum(rank.terms.values()) == rank.device_bytes
        assert rank.allocated_bytes <= rank.reserved_bytes <= rank.device_bytes


@given(SHAPES, st.data())
def test_the_worst_rank_of_the_search_is_the_maximum_over_all_ranks(shape: ModelShape, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(layouts(shape), min_size=1, max_size=6))
    job = Job(shape, Workload(4096, 1024), FACTS)
    found = worst_ranks(job, LayoutColumns.of(chosen))
    for i, layout in enumerate(chosen):
        worst = estimate(job, layout).worst
        assert found.device_bytes[i] == worst.device_bytes
        assert found.pipeline_rank[i] == worst.pipeline_rank


@given(SHAPES, st.data())
def test_a_larger_micro_batch_never_needs_less(shape: ModelShape, data: st.DataObject) -> None:
    layout = data.draw(layouts(shape))
    larger = replace(layout, micro_batch_size=2 * layout.micro_batch_size)
    small = estimate(job_of(shape, layout), layout, num_microbatches=8).worst
    large = estimate(job_of(shape, larger), larger, num_microbatches=8).worst
    assert large.device_bytes >= small.device_bytes


@given(SHAPES, st.data())
def test_a_longer_sequence_never_needs_less(shape: ModelShape, data: st.DataObject) -> None:
    layout = data.draw(layouts(shape))
    short = estimate(job_of(shape, layout, length=2048), layout).worst
    long = estimate(job_of(shape, layout, length=4096), layout).worst
    assert long.device_bytes >= short.device_bytes


@pytest.mark.parametrize("field", ["tensor", "data", "pipeline", "context"])
@given(data=st.data())
def test_sharding_further_never_adds_static_state(field: str, data: st.DataObject) -> None:
    layout = data.draw(layouts(LLAMA3_8B))
    further = replace(layout, virtual_pipeline=1, **{field: 2 * getattr(layout, field)})
    layout = replace(layout, virtual_pipeline=1)
    before = max(static(r) for r in estimate(job_of(LLAMA3_8B, layout), layout).ranks)
    after = max(static(r) for r in estimate(job_of(LLAMA3_8B, further), further).ranks)
    # vocabulary padding to 128 x tensor may add a few rows: 128 rows of the table at 18 bytes
    assert after <= before + 128 * LLAMA3_8B.hidden_size * 18


@given(data=st.data())
def test_a_higher_zero_stage_never_keeps_more_state(data: st.DataObject) -> None:
    layout = data.draw(layouts(LLAMA2_7B))
    # gradients differ with the moment of the peak, and buckets come with ZeRO: only what lasts is ordered
    job = Job(LLAMA2_7B, Workload(2048, 512), replace(deepspeed_facts(), live_parameters=0.0))
    kept = []
    for stage in range(4):
        rank = estimate(job, replace(layout, zero_stage=stage)).ranks[0]
        kept.append(static(rank))
    # stage 3 holds shards and one gathered layer, so with few devices it may hold more than stage 2
    assert kept[0] >= kept[1] >= kept[2]
    if layout.data * layout.context >= 8:
        assert kept[2] >= kept[3]


def test_pricing_one_layout_and_many_is_the_same_formula() -> None:
    layout = Layout(4, 4, data=4, sequence_parallel=1, zero_stage=1)
    job = job_of(LLAMA3_8B, layout)
    many = worst_ranks(job, LayoutColumns.of([layout] * 1000))
    assert np.all(many.device_bytes == estimate(job, layout).worst.device_bytes)
