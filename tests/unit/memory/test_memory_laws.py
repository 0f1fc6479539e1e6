"""Laws no memory estimate may break, over layouts drawn at random."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes import LLAMA2_7B, LLAMA3_8B, SHAPES, layouts

from llmlaunch.backends.deepspeed.facts import deepspeed_facts
from llmlaunch.backends.megatron.facts import megatron_facts
from llmlaunch.layout import Layout
from llmlaunch.memory.estimator import RankEstimate, estimate
from llmlaunch.memory.job import Job
from llmlaunch.models.shape import ModelShape
from llmlaunch.workload import Workload

FACTS = megatron_facts()
STATIC = ("parameters", "gradients", "optimizer_states")


def job_of(shape: ModelShape, layout: Layout, microbatches: int = 8, length: int = 4096) -> Job:
    return Job(shape, Workload(length, microbatches * layout.data * layout.micro_batch_size), FACTS)


def static(rank: RankEstimate) -> int:
    return sum(rank.terms[name] for name in STATIC)


@given(SHAPES, st.data())
def test_a_larger_micro_batch_never_needs_less(shape: ModelShape, data: st.DataObject) -> None:
    layout = data.draw(layouts(shape))
    larger = replace(layout, micro_batch_size=2 * layout.micro_batch_size)
    small, large = (estimate(job_of(shape, at), at, num_microbatches=8).worst for at in (layout, larger))
    assert large.device_bytes >= small.device_bytes


@given(SHAPES, st.data())
def test_a_longer_sequence_never_needs_less(shape: ModelShape, data: st.DataObject) -> None:
    layout = data.draw(layouts(shape))
    short, long = (estimate(job_of(shape, layout, length=length), layout).worst for length in (2048, 4096))
    assert long.device_bytes >= short.device_bytes


@pytest.mark.parametrize("field", ["tensor", "data", "pipeline", "context"])
@given(data=st.data())
def test_sharding_further_never_adds_static_state(field: str, data: st.DataObject) -> None:
    layout = replace(data.draw(layouts(LLAMA3_8B)), virtual_pipeline=1)
    further = replace(layout, **{field: 2 * getattr(layout, field)})
    before, after = (max(map(static, estimate(job_of(LLAMA3_8B, at), at).ranks)) for at in (layout, further))
    # vocabulary padding to 128 x tensor may add a few rows: 128 rows of the table at 18 bytes
    assert after <= before + 128 * LLAMA3_8B.hidden_size * 18


@given(data=st.data())
def test_a_higher_zero_stage_never_keeps_more_state(data: st.DataObject) -> None:
    layout = data.draw(layouts(LLAMA2_7B))
    # gradients differ with the moment of the peak, and buckets come with ZeRO: only what lasts is ordered
    job = Job(LLAMA2_7B, Workload(2048, 512), replace(deepspeed_facts(), live_parameters=0.0))
    stages = [static(estimate(job, replace(layout, zero_stage=stage)).ranks[0]) for stage in range(4)]
    # stage 3 holds shards and one gathered layer, so with few devices it may hold more than stage 2
    assert stages[0] >= stages[1] >= stages[2]
    if layout.data * layout.context >= 8:
        assert stages[2] >= stages[3]
