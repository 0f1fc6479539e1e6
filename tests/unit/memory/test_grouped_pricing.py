"""A layout priced from its halves is the layout priced at once: to the byte, on the same rank, for every backend."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes import CORRECTIONS, LLAMA3_8B, SHAPES, any_layouts

from llmlaunch.facts import MemoryFacts
from llmlaunch.frameworks.deepspeed.facts import DeepSpeedOptions, ZeroSettings, deepspeed_facts
from llmlaunch.frameworks.megatron.facts import MegatronOptions, megatron_facts
from llmlaunch.frameworks.megatron.sharding_rules import megatron_fsdp_facts
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, Layout, LayoutColumns
from llmlaunch.memory.estimator import estimate, worst_ranks
from llmlaunch.memory.grouped_pricing import (
    ModelStateBytes,
    distinct_states,
    model_state_bytes,
    rank_pieces,
    state_fields,
    transient_bytes,
    worst_of_sums,
)
from llmlaunch.memory.host import HostNode
from llmlaunch.memory.job import Correction, Job, all_ranks
from llmlaunch.models.shape import ModelShape, MoeShape
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.workload import Workload
from support.soak import examples
from validation.fsdp import (
    atorch_facts,
    composer_facts,
    internevo_facts,
    torchtitan_facts,
    torchtune_facts,
)
from validation.megatron_deepspeed import megatron_deepspeed_facts

JOB, NODE = Job(LLAMA3_8B, Workload(4096, 64), megatron_facts()), HostNode(processes=8)
NODES = st.builds(HostNode, st.just(8), checkpoints=st.booleans(), resident=st.booleans())

# By backend: facts of step techniques, and of the same with other formats of the model states.
PAIRS: dict[str, tuple[MemoryFacts, MemoryFacts]] = {
    "megatron": (megatron_facts(), megatron_facts(MegatronOptions(gradient_dtype="bf16"))),
    "megatron fp8": (
        megatron_facts(MegatronOptions(fp8_recipe="tensorwise", tp_comm_overlap=True)),
        megatron_facts(MegatronOptions(fp8_recipe="tensorwise", tp_comm_overlap=True, gradient_dtype="bf16")),
    ),
    "megatron muon": (megatron_facts(MegatronOptions(muon=True)),) * 2,
    "whole matrices": (megatron_facts(MegatronOptions(muon=True, matrices_whole=True)),) * 2,
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
    "deepspeed liger": (deepspeed_facts(DeepSpeedOptions(liger=True, zero=ZeroSettings(secondary_ranks=8))),) * 2,
    "torchtitan": (torchtitan_facts(False, False, False, 1),) * 2,
    "torchtitan compiled": (torchtitan_facts(True, True, True, 2),) * 2,
    "torchtune": (torchtune_facts("bf16", False, True, True),) * 2,
    "composer": (composer_facts(),) * 2,
    "atorch": (atorch_facts(),) * 2,
    "internevo": (internevo_facts(),) * 2,
}
STEP_TECHNIQUES = st.sampled_from(
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
STATE_TECHNIQUES = st.sampled_from(
    [
        {},
        {"offload_optimizer": 0.5},
        {"offload_optimizer": 1.0},
        {"offload_parameters": True},
        {"offload_optimizer": 1.0, "offload_parameters": True},
    ]
)
FEWER = examples(4, 700)  # of each backend
FOR_ALL = st.one_of(
    st.sampled_from([{}, {"weight_versions": 2}, {"loss": "tiled"}]),
    st.fixed_dictionaries({"trained_layers": st.integers(1, 32)}),
)


def stripped(job: Job, chosen: LayoutColumns) -> LayoutColumns:
    """The layouts with 1 or 0 in every field that model states have no business to read."""
    ones, zeros = np.ones(len(chosen), dtype=np.int64), np.zeros(len(chosen), dtype=np.int64)
    unread = ("sequence_parallel", "recompute", "recompute_layers", "offload_layers")
    states = replace(chosen, micro_batch_size=ones, **dict.fromkeys(unread, zeros))
    return states if "virtual_pipeline" in state_fields(job, chosen) else replace(states, virtual_pipeline=ones)


@pytest.mark.parametrize("backend", PAIRS)
@FEWER
@given(
    shape=SHAPES,
    data=st.data(),
    node=NODES,
    step=STEP_TECHNIQUES,
    state=STATE_TECHNIQUES,
    both=FOR_ALL,
    correction=CORRECTIONS,
)
def test_the_halves_of_a_layout_price_it_to_the_byte(
    backend: str,
    shape: ModelShape,
    data: st.DataObject,
    node: HostNode,
    step: Techniques,
    state: dict[str, object],
    both: dict[str, object],
    correction: Correction,
) -> None:
    """And the worst rank is the maximum over all ranks, each priced by itself."""
    chosen = data.draw(st.lists(any_layouts(shape), min_size=1, max_size=5))
    columns = LayoutColumns.of(chosen)
    step_facts, state_facts = PAIRS[backend]
    techniques = replace(step, **both)  # type: ignore[arg-type]
    whole = replace(techniques, **state)  # type: ignore[arg-type]
    job = Job(shape, Workload(4096, 1024), state_facts, techniques=whole, correction=correction)
    step_job = replace(job, facts=step_facts, techniques=techniques)
    state_job = replace(job, techniques=Techniques(**both, **state))  # type: ignore[arg-type]

    outer, of = distinct_states(job, columns)
    transient = transient_bytes(step_job, replace(columns, zero_stage=np.zeros_like(columns.zero_stage)), node)
    worst = worst_of_sums(transient, model_state_bytes(state_job, stripped(job, outer), node), of)

    alone = [estimate(job, layout, node=node) for layout in chosen]
    for many in (worst, worst_ranks(job, columns)):
        assert list(many.device_bytes) == [each.worst.device_bytes for each in alone]
        assert list(many.pipeline_rank) == [each.worst.pipeline_rank for each in alone]
    assert list(worst.host_bytes) == [each.host_bytes_per_node for each in alone]


@pytest.mark.parametrize("backend", ["megatron", "megatron-fsdp", "deepspeed offload", "torchtitan"])
def test_what_techniques_and_states_share_prices_them_as_each_alone(backend: str) -> None:
    """The ranks of splits, priced with one set of techniques after another; and several sets of states side by side."""
    layouts = LayoutColumns.of(
        Layout(tensor=t, pipeline=p, virtual_pipeline=v, data=8, micro_batch_size=b)
        for t, p, v, b in product((1, 4), (1, 4), (1, 2), (1, 8))
    )
    step_facts, state_facts = PAIRS[backend]
    outer, of = distinct_states(JOB, layouts)
    offloads = (NO_TECHNIQUES, Techniques(offload_optimizer=1.0))
    state_jobs = [replace(JOB, facts=state_facts, techniques=techniques) for techniques in offloads]
    states = [model_state_bytes(job, outer, NODE) for job in state_jobs]
    together, ranks = ModelStateBytes.joined(states), rank_pieces(replace(JOB, facts=step_facts), layouts)
    assert list(together.sums.least) == [least for each in states for least in each.sums.least]
    kinds = (RECOMPUTE_NONE, NO_TECHNIQUES), (RECOMPUTE_FULL, Techniques(recompute_method="block"))
    for recompute, techniques in (*kinds, (RECOMPUTE_SELECTIVE, Techniques(recompute_modules=("core_attn", "mlp")))):
        job, mine = replace(JOB, facts=step_facts, techniques=techniques), layouts.with_techniques(0, recompute, 1, 0)
        shared = transient_bytes(job, mine, NODE, ranks)
        for place, alone in enumerate(states):
            worst = worst_of_sums(transient_bytes(job, mine, NODE), alone, of)
            for same in (worst_of_sums(shared, alone, of), worst_of_sums(shared, together, of + place * len(outer))):
                assert list(same.device_bytes) == list(worst.device_bytes)
                assert list(same.host_bytes) == list(worst.host_bytes)
                assert list(same.pipeline_rank) == list(worst.pipeline_rank)


def test_uneven_stages_are_not_taken_for_even_ones() -> None:
    even, uneven = (LayoutColumns.of([Layout(pipeline=2, layers_by_stage=split)]) for split in ((), (15, 17)))
    states = model_state_bytes(JOB, even, NODE)
    with pytest.raises(ValueError, match="uneven"):
        worst_of_sums(transient_bytes(JOB, uneven, NODE), states, np.zeros(1, dtype=np.int64))


def test_stages_that_differ_are_counted_apart() -> None:
    """Many layouts at once, whose ranks, chunks and stages are as many, or cut by the same numbers; the first layers of
    the model are dense, the others mixtures."""
    pattern = (0,) * 3 + (1,) * 29
    shape = replace(LLAMA3_8B, moe=MoeShape(8, 2, 2048, 0, pattern, grouped_gemm=True))
    job, eighths = replace(JOB, shape=shape), (1, 7, 2, 6, 3, 5, 3, 5)
    layouts = [
        *(Layout(pipeline=2, layers_by_stage=(cut, 32 - cut)) for cut in (9, 12, 15)),
        *(Layout(pipeline=stages, virtual_pipeline=8 // stages, layers_by_stage=eighths) for stages in (2, 4, 8)),
        *(Layout(pipeline=stages, virtual_pipeline=chunks) for stages in (2, 4, 8) for chunks in (1, 2, 4)),
    ]
    together = all_ranks(job, LayoutColumns.of(layouts))
    alone = [all_ranks(job, LayoutColumns.of([layout])) for layout in layouts]
    assert len(together.counts) == 2
    for kind, counts in enumerate(together.counts):
        assert list(counts) == list(np.concatenate([each.counts[kind] for each in alone]))


def test_no_layouts_are_priced_as_none() -> None:
    none = LayoutColumns.of([])
    states = model_state_bytes(JOB, none, NODE)
    worst = worst_of_sums(transient_bytes(JOB, none, NODE), states, np.zeros(0, dtype=np.int64))
    assert len(worst.device_bytes) == len(worst.host_bytes) == len(worst_ranks(JOB, none).device_bytes) == 0
