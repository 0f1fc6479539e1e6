"""The estimator against ranks of large jobs, run as real Megatron core under fake tensors.

Source: traces of megatron-core 0.19.2 (GPTModel, DDP, DistributedOptimizer, real schedules) on a CPU with torch 2.13
FakeTensorMode and torch's fake process group; every live "CUDA" storage counted. Sequence 8192 (Llama 2: 4096),
micro-batch 1, bf16, sequence parallel, distributed optimizer with fp32 gradients, fused gradient accumulation. Kernel
workspaces are not in a trace.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from shapes import LLAMA2_7B, LLAMA3_8B, LLAMA3_70B

from llmlaunch.frameworks.megatron.facts import megatron_facts
from llmlaunch.layout import RECOMPUTE_FULL, Layout
from llmlaunch.memory.estimator import estimate
from llmlaunch.memory.job import Job
from llmlaunch.models.shape import ModelShape
from llmlaunch.units import GIB
from llmlaunch.workload import Workload
from support.changed_facts import changed

TRACED_FACTS = changed(megatron_facts(), workspace_bytes=0.0, weight_gradient_stubs=False, sequence_gather="all")

TRACES = [
    *[
        (LLAMA3_8B, Layout(4, 4, data=32), 8, stage, peak)
        for stage, peak in enumerate([12.1051, 9.2136, 7.0866, 7.0942])
    ],
    (LLAMA3_8B, Layout(4, 4, data=16, context=2), 8, 0, 7.7512),
    (LLAMA3_8B, Layout(4, 4, data=16, context=2), 8, 3, 5.2321),
    (LLAMA3_8B, Layout(4, 4, data=32, recompute=RECOMPUTE_FULL), 8, 0, 4.3627),
    (LLAMA3_8B, Layout(4, 4, data=32, recompute=RECOMPUTE_FULL), 8, 3, 5.0921),
    (LLAMA3_8B, Layout(4, 4, virtual_pipeline=2, data=32), 8, 0, 15.3312),
    (LLAMA3_8B, Layout(4, 4, virtual_pipeline=2, data=32), 8, 3, 10.2731),
    (LLAMA2_7B, Layout(8, 4, data=16), 8, 0, 3.4750),
    *[
        (LLAMA3_70B, Layout(8, 8, data=8), 16, stage, peak)
        for stage, peak in enumerate([29.7263, 26.2043, 23.5846, 20.9649, 18.3452, 15.7255, 13.1058, 11.9347])
    ],
]


@pytest.mark.parametrize(
    ("shape", "layout", "microbatches", "stage", "traced_gib"),
    TRACES,
    ids=[f"{t[0].name}-{t[1].describe().replace(' ', '-')}-rank{t[3]}" for t in TRACES],
)
def test_allocated_peak_is_within_two_percent_of_the_trace(
    shape: ModelShape, layout: Layout, microbatches: int, stage: int, traced_gib: float
) -> None:
    layout = replace(layout, sequence_parallel=1, zero_stage=1)
    length = 4096 if shape is LLAMA2_7B else 8192
    job = Job(shape, Workload(length, microbatches * layout.data), TRACED_FACTS)
    rank = estimate(job, layout).ranks[stage]
    assert rank.allocated_bytes / GIB == pytest.approx(traced_gib, rel=0.02)
