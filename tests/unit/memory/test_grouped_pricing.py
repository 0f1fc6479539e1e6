"""A layout priced from its halves is the layout priced at once: to the byte, on the same rank, for every backend."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import ALTERNATING, LLAMA2_7B, LLAMA3_8B, MIXTRAL
from test_memory_laws import CORRECTIONS, layouts

from llmlaunch.backends.deepspeed.facts import DeepSpeedOptions, deepspeed_facts
from llmlaunch.backends.deepspeed.megatron_deepspeed_facts import megatron_deepspeed_facts
from llmlaunch.backends.fsdp import (
    atorch_facts,
    composer_facts,
    internevo_facts,
    torchtitan_facts,
    torchtune_facts,
)
from llmlaunch.backends.megatron.facts import MegatronOptions, megatron_facts, megatron_fsdp_facts
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.correction import Correction
from llmlaunch.memory.estimator import estimate, worst_ranks
from llmlaunch.memory.facts import MemoryFacts
from llmlaunch.memory.grouped_pricing import (
    distinct_states,
    model_state_bytes,
    state_fields,
    transient_bytes,
    worst_of_sums,
)
from llmlaunch.memory.host import HostNode, worst_hosts
from llmlaunch.memory.job import Job
from llmlaunch.models.shape import ModelShape
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.workload import Workload

SHAPES = st.sampled_from([LLAMA3_8B, LLAMA2_7B, MIXTRAL, ALTERNATING])
NODES = st.builds(HostNode, st.just(8), checkpoints=st.booleans(), resident=st.booleans())

# By backend: facts of the words that run, and of the same with other words of what is held.
PAIRS: dict[str, tuple[MemoryFacts, MemoryFacts]] = {
    "megatron": (megatron_facts(), megatron_facts(MegatronOptions(gradient_dtype="bf16"))),
    "megatron fp8": (
        megatron_facts(MegatronOptions(fp8_recipe="tensorwise", tp_comm_overlap=True)),
        megatron_facts(MegatronOptions(fp8_recipe="tensorwise", tp_comm_overlap=True, gradient_dtype="bf16")),
    ),
    "megatron muon": (megatron_facts(MegatronOptions(muon=True)),) * 2,
    "megatron-fsdp": (
        megatron_fsdp_facts(MegatronOptions()),
        megatron_fsdp_facts(MegatronOptions(gradient_dtype="bf16")),
    ),
    "megatron-deepspeed": (megatron_deepspeed_facts("bf16"), megatron_deepspeed_facts("bf16", "bf16")),
    "deepspeed": (deepspeed_facts(), deepspeed_facts(DeepSpeedOptions(accumulation="fp32"))),
    "deepspeed fp32": (
        deepspeed_facts(DeepSpeedOptions("fp32")),
        deepspeed_facts(DeepSpeedOptions("fp32", offload_optimizer=True)),
    ),
    "deepspeed fp16": (
        deepspeed_facts(DeepSpeedOptions("fp16", split_from_start=True)),
        deepspeed_facts(DeepSpeedOptions("fp16", split_from_start=True, offload_optimizer=True)),
    ),
    "deepspeed offload": (
        deepspeed_facts(DeepSpeedOptions(expandable_segments=True, sequence_ranks=2)),
        deepspeed_facts(DeepSpeedOptions(expandable_segments=True, sequence_ranks=2, offload_optimizer=True)),
    ),
    "deepspeed liger": (deepspeed_facts(DeepSpeedOptions(liger=True, secondary_ranks=8)),) * 2,
    "torchtitan": (torchtitan_facts(False, False, False, 1),) * 2,
    "torchtitan compiled": (torchtitan_facts(True, True, True, 2),) * 2,
    "torchtune": (torchtune_facts("bf16", False, True, True),) * 2,
    "composer": (composer_facts(),) * 2,
    "atorch": (atorch_facts(),) * 2,
    "internevo": (internevo_facts(),) * 2,
}
RUNNING_WORDS = st.sampled_from(
    [
        NO_TECHNIQUES,
        Techniques(recompute_modules=("core_attn", "mlp")),
        Techniques(recompute_method="block"),
        Techniques(offload_modules=("qkv_linear", "core_attn")),
        Techniques(offload_checkpoints=True),
        Techniques(swapped_share=0.5),
        Techniques(delay_weight_gradients=True),
    ]
)
HELD_WORDS = st.sampled_from(
    [
        {},
        {"offload_optimizer": 0.5},
        {"offload_optimizer": 1.0},
        {"offload_parameters": True},
        {"offload_optimizer": 1.0, "offload_parameters": True},
    ]
)
FEWER = settings().max_examples // 3  # of each backend
FOR_ALL = st.sampled_from([{}, {"trained_layers": 5}, {"weight_versions": 2}, {"loss": "tiled"}])


@st.composite
def any_layouts(draw: st.DrawFn, shape: ModelShape) -> Layout:
    layout = draw(layouts(shape))
    layout = replace(layout, recompute_layers=draw(st.integers(0, 2)), offload_layers=draw(st.integers(0, 2)))
    if layout.pipeline == 1 or draw(st.booleans()):
        return layout
    stages = layout.pipeline * layout.virtual_pipeline
    cuts = draw(st.lists(st.integers(0, 32), min_size=stages - 1, max_size=stages - 1))
    return replace(layout, layers_by_stage=tuple(b - a for a, b in pairwise([0, *sorted(cuts), 32])))


def stripped(job: Job, chosen: LayoutColumns) -> LayoutColumns:
    """The layouts with 1 or 0 in every field that what is held has no business to read."""
    ones, zeros = np.ones(len(chosen), dtype=np.int64), np.zeros(len(chosen), dtype=np.int64)
    held = replace(
        chosen,
        micro_batch_size=ones,
        sequence_parallel=zeros,
        recompute=zeros,
        recompute_layers=zeros,
        offload_layers=zeros,
    )
    return held if "virtual_pipeline" in state_fields(job, chosen) else replace(held, virtual_pipeline=ones)


@pytest.mark.parametrize("backend", PAIRS)
@settings(max_examples=FEWER)
@given(
    shape=SHAPES,
    data=st.data(),
    node=NODES,
    running=RUNNING_WORDS,
    held=HELD_WORDS,
    both=FOR_ALL,
    correction=CORRECTIONS,
)
def test_the_halves_of_a_layout_price_it_to_the_byte(
    backend: str,
    shape: ModelShape,
    data: st.DataObject,
    node: HostNode,
    running: Techniques,
    held: dict[str, object],
    both: dict[str, object],
    correction: Correction,
) -> None:
    columns = LayoutColumns.of(data.draw(st.lists(any_layouts(shape), min_size=1, max_size=5)))
    runs, holds = PAIRS[backend]
    words = replace(running, **both)  # type: ignore[arg-type]
    job = Job(shape, Workload(4096, 1024), holds, techniques=replace(words, **held), correction=correction)  # type: ignore[arg-type]
    running_job = replace(job, facts=runs, techniques=words)
    held_job = replace(job, techniques=Techniques(**both, **held))  # type: ignore[arg-type]

    outer, of = distinct_states(job, columns)
    first = transient_bytes(running_job, replace(columns, zero_stage=np.zeros_like(columns.zero_stage)), node)
    found = worst_of_sums(first, model_state_bytes(held_job, stripped(job, outer), node), of)

    expected = worst_ranks(job, columns)
    assert np.array_equal(found.device_bytes, expected.device_bytes)
    assert np.array_equal(found.pipeline_rank, expected.pipeline_rank)
    assert np.array_equal(found.host_bytes, worst_hosts(job, columns, node))


@pytest.mark.parametrize("backend", PAIRS)
@settings(max_examples=FEWER)
@given(shape=SHAPES, data=st.data(), words=RUNNING_WORDS, correction=CORRECTIONS)
def test_the_worst_rank_of_every_backend_is_the_maximum_over_all_ranks(
    backend: str, shape: ModelShape, data: st.DataObject, words: Techniques, correction: Correction
) -> None:
    layout = data.draw(any_layouts(shape))
    job = Job(shape, Workload(4096, 1024), PAIRS[backend][1], techniques=words, correction=correction)
    found, worst = worst_ranks(job, LayoutColumns.of([layout])), estimate(job, layout).worst
    assert (found.device_bytes[0], found.pipeline_rank[0]) == (worst.device_bytes, worst.pipeline_rank)


def test_uneven_stages_are_not_taken_for_even_ones() -> None:
    job, node = Job(LLAMA3_8B, Workload(4096, 64), megatron_facts()), HostNode(processes=8)
    even, uneven = Layout(pipeline=2), Layout(pipeline=2, layers_by_stage=(15, 17))
    held = model_state_bytes(job, LayoutColumns.of([even]), node)
    with pytest.raises(ValueError, match="uneven"):
        worst_of_sums(transient_bytes(job, LayoutColumns.of([uneven]), node), held, np.zeros(1, dtype=np.int64))


def test_no_layouts_are_priced_as_none() -> None:
    job, node = Job(LLAMA3_8B, Workload(4096, 64), megatron_facts()), HostNode(processes=8)
    none = LayoutColumns.of([])
    found = worst_of_sums(
        transient_bytes(job, none, node), model_state_bytes(job, none, node), np.zeros(0, dtype=np.int64)
    )
    assert len(found.device_bytes) == len(found.host_bytes) == len(worst_ranks(job, none).device_bytes) == 0
