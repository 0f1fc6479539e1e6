"""The ranks that a search prices have the worst one of each layout among them: no estimate of a chosen layout says
more than its verdict."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_jobs import TECHNIQUES, TRAINERS, RandomJob, random_jobs
from shapes import LLAMA3_8B, job_of

from llmlaunch.frameworks.megatron.facts import MegatronOptions, megatron_facts
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.estimator import estimate, worst_ranks
from llmlaunch.memory.grouped_pricing import distinct_states, model_state_bytes, transient_bytes, worst_of_sums
from llmlaunch.memory.host import HostNode
from llmlaunch.memory.job import Job
from llmlaunch.models.sections import Vision
from llmlaunch.models.shape import ModelShape
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.techniques.requests import Adapters
from support.soak import examples

NODE = HostNode(processes=8, checkpoints=True)


def check_the_worst_rank_is_priced(job: Job, layout: Layout) -> None:
    """Device bytes and host bytes of the search are those of the worst of all ranks."""
    columns = LayoutColumns.of([layout])
    outer, of = distinct_states(job, columns)
    searched = worst_of_sums(transient_bytes(job, columns, NODE), model_state_bytes(job, outer, NODE), of)
    alone = estimate(job, layout, node=NODE)
    assert searched.device_bytes[0] == worst_ranks(job, columns).device_bytes[0]
    assert searched.device_bytes[0] == alone.worst.device_bytes
    assert searched.host_bytes[0] == alone.host_bytes_per_node


@pytest.mark.parametrize("name", [name for name in TRAINERS if "Megatron" in name or "pipeline" in name])
@examples(6)
@given(data=st.data())
def test_of_any_trainer_with_a_pipeline(name: str, data: st.DataObject) -> None:
    drawn: RandomJob = data.draw(random_jobs(name))
    layout = replace(drawn.layout, pipeline=4, virtual_pipeline=data.draw(st.sampled_from([1, 2])), layers_by_stage=())
    job = replace(drawn.job, techniques=data.draw(st.just(drawn.job.techniques) | TECHNIQUES))
    check_the_worst_rank_is_priced(job, layout)


DEEP = Layout(pipeline=8, data=8, zero_stage=1)
ENCODER = Vision(27, 1152, 4304, 16, image_size=768)
INNER = {
    "weight gradients wait": (Techniques(zero_bubble=True), {}, {}),
    "matrices whole": (NO_TECHNIQUES, {"muon": True}, {}),
    "optimizer on the host": (Techniques(offload_optimizer=1.0), {}, {}),
    "a part of the optimizer on the host": (Techniques(offload_optimizer=0.5), {}, {}),
    "some layers recomputed": (Techniques(recompute_method="block"), {}, {"recompute": 2, "recompute_layers": 2}),
    "layers on the host": (NO_TECHNIQUES, {}, {"offload_layers": 3}),
    "chunks": (NO_TECHNIQUES, {}, {"virtual_pipeline": 2}),
    "late layers trained": (Techniques(trained_layers=9), {}, {}),
    "adapters": (Techniques(adapters=Adapters(16)), {}, {}),
}
SHAPES = {
    "plain": LLAMA3_8B,
    "tied": replace(LLAMA3_8B, tied_embeddings=True),
    "a small vocabulary": replace(LLAMA3_8B, vocab_size=1024),
    "a large vocabulary": replace(LLAMA3_8B, vocab_size=512_000),
    "prediction heads": replace(LLAMA3_8B, mtp_num_layers=2),
    "a vision encoder": replace(LLAMA3_8B, vision=ENCODER),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("techniques", "options", "changes"), INNER.values(), ids=INNER)
def test_where_inner_ranks_differ(
    shape: ModelShape, techniques: Techniques, options: dict[str, bool], changes: dict[str, int]
) -> None:
    for tensor, microbatches in ((1, 1), (4, 16)):
        layout = replace(DEEP, tensor=tensor, **changes)
        facts = megatron_facts(MegatronOptions(**options))
        check_the_worst_rank_is_priced(job_of(shape, layout, facts, techniques, 4096, microbatches), layout)


def test_an_inner_rank_may_be_the_worst_where_weight_gradients_wait() -> None:
    """A million tokens over four stages: the second one needs more than the first, and more than the card has."""
    shape = ModelShape("narrow", 64, 2560, 10240, 32, 2, 80, 32000, 2**20, tied_embeddings=True)
    layout = Layout(tensor=8, pipeline=4, context=4, data=8, sequence_parallel=1)
    job = job_of(shape, layout, techniques=Techniques(zero_bubble=True), length=2**20, microbatches=2)
    assert 0 < worst_ranks(job, LayoutColumns.of([layout])).pipeline_rank[0] < 3
    check_the_worst_rank_is_priced(job, layout)


def test_uneven_stages_prediction_heads_and_kinds_of_layers_are_priced_rank_by_rank() -> None:
    uneven = replace(DEEP, pipeline=4, layers_by_stage=(6, 11, 8, 7))
    assert worst_ranks(job_of(LLAMA3_8B, uneven), LayoutColumns.of([uneven])).pipeline_rank[0] == 1
    heads = job_of(replace(LLAMA3_8B, mtp_num_layers=2), DEEP, techniques=Techniques(mtp_stage="before-last"))
    for job, layout in ((job_of(LLAMA3_8B, uneven), uneven), (heads, DEEP)):
        check_the_worst_rank_is_priced(job, layout)
    assert np.all(worst_ranks(heads, LayoutColumns.of([DEEP])).device_bytes > 0)
