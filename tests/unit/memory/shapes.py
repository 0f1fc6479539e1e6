"""Model shapes, random layouts and corrections, and the estimate of a few lines, that the memory tests share."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from llmlaunch.facts import MemoryFacts
from llmlaunch.frameworks.megatron.facts import megatron_facts
from llmlaunch.layout import Layout
from llmlaunch.memory.estimator import RankEstimate, estimate
from llmlaunch.memory.job import NO_CORRECTION, Correction, Job
from llmlaunch.models.shape import ModelShape, MoeShape
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.units import GIB
from llmlaunch.workload import Workload

LLAMA3_8B = ModelShape("llama3-8b", 32, 4096, 14336, 32, 8, 128, 128256, 8192)
LLAMA3_70B = ModelShape("llama3-70b", 80, 8192, 28672, 64, 8, 128, 128256, 8192)
LLAMA2_7B = ModelShape("llama2-7b", 32, 4096, 11008, 32, 32, 128, 32000, 4096)
MIXTRAL = ModelShape("mixtral-8x7b", 32, 4096, 14336, 32, 8, 128, 32000, 32768, moe=MoeShape(8, 2, 14336, 0, (1,) * 32))
ALTERNATING = ModelShape(
    "alternating", 32, 2048, 8192, 16, 16, 128, 32000, 4096, moe=MoeShape(16, 2, 8192, 0, (0, 1) * 8 + (1, 1) * 8)
)
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


@st.composite
def any_layouts(draw: st.DrawFn, shape: ModelShape) -> Layout:
    """Layouts with offloaded layers, layers recomputed together, and uneven stages."""
    layout = draw(layouts(shape))
    layout = replace(layout, recompute_layers=draw(st.integers(0, 2)), offload_layers=draw(st.integers(0, 2)))
    if layout.pipeline == 1 or draw(st.booleans()):
        return layout
    stages = layout.pipeline * layout.virtual_pipeline
    cuts = draw(st.lists(st.integers(0, 32), min_size=stages - 1, max_size=stages - 1))
    return replace(layout, layers_by_stage=tuple(b - a for a, b in pairwise([0, *sorted(cuts), 32])))


MEGATRON = megatron_facts()


def job_of(
    shape: ModelShape,
    layout: Layout,
    facts: MemoryFacts = MEGATRON,
    techniques: Techniques = NO_TECHNIQUES,
    length: int = 4096,
    microbatches: int = 8,
) -> Job:
    """Return the job whose batch gives each pipeline of `layout` so many micro-batches a step."""
    batch = microbatches * layout.data * layout.micro_batch_size
    return Job(shape, Workload(length, batch), facts, techniques=techniques)


def ranks(
    shape: ModelShape,
    layout: Layout,
    facts: MemoryFacts = MEGATRON,
    techniques: Techniques = NO_TECHNIQUES,
    length: int = 4096,
    microbatches: int = 8,
) -> tuple[RankEstimate, ...]:
    """Return the estimate of each pipeline rank of such a job."""
    return estimate(job_of(shape, layout, facts, techniques, length, microbatches), layout).ranks
