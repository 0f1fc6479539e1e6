"""No cut of the layers makes the fullest rank need less than the floor says; and the distributed optimizer makes its
buffers beside the parameters that move there, which may be the peak."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from shapes import CORRECTIONS, ranks

from llmlaunch.frameworks.framework import backend_for
from llmlaunch.layout import RECOMPUTE_FULL, Layout, LayoutColumns
from llmlaunch.memory.estimator import RankEstimate, worst_ranks
from llmlaunch.memory.job import Correction, Job
from llmlaunch.memory.states import least_state_bytes
from llmlaunch.models.shape import ModelShape, MoeShape
from support.recipes import recipe_of
from support.soak import examples

RECIPES = [recipe_of(name) for name in ("llama3-8b", "mixtral-8x7b")]
JOBS = [Job(recipe.model, recipe.workload, backend_for(recipe).facts(recipe)) for recipe in RECIPES]


@examples(20, 2000)
@given(
    job=st.sampled_from(JOBS),
    pipeline=st.integers(2, 6),
    tensor=st.sampled_from([1, 2]),
    data=st.data(),
    correction=CORRECTIONS,
)
def test_every_cut_needs_at_least_the_floor(
    job: Job, pipeline: int, tensor: int, data: st.DataObject, correction: Correction
) -> None:
    job = replace(job, correction=correction)
    layers = job.shape.num_layers
    inner = st.lists(st.integers(1, layers - 1), min_size=pipeline - 1, max_size=pipeline - 1, unique=True)
    cuts = sorted(data.draw(inner))
    split = tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))
    layout = Layout(
        tensor=tensor,
        pipeline=pipeline,
        data=data.draw(st.sampled_from([1, 4])),
        zero_stage=data.draw(st.sampled_from([0, 1])),
        sequence_parallel=int(tensor > 1),
        layers_by_stage=split,
    )
    columns = LayoutColumns.of([layout])
    floor = least_state_bytes(job, columns)[0]
    assert 0 < floor <= worst_ranks(job, columns).device_bytes[0]


SHAPE = ModelShape("plain", 16, 4096, 14336, 32, 8, 128, 1024, 8192)
WIDE = Layout(data=256, zero_stage=1, recompute=RECOMPUTE_FULL)


def only_rank(shape: ModelShape, layout: Layout, length: int = 128) -> RankEstimate:
    return ranks(shape, layout, length=length, microbatches=layout.pipeline)[0]


def test_parameters_lie_there_twice_beside_their_gradients() -> None:
    rank = only_rank(SHAPE, WIDE)
    parameters = rank.terms["parameters"]
    assert rank.allocated_bytes == parameters + rank.terms["gradients"] + parameters
    assert rank.terms["whole_model"] > 0


def test_of_a_mixture_the_experts_are_moved_last() -> None:
    mixture = replace(SHAPE, moe=MoeShape(8, 2, 14336, 0, (1,) * 16))
    rank = only_rank(mixture, replace(WIDE, expert=8))
    experts = 2 * 16 * 3 * 4096 * 14336
    assert rank.allocated_bytes == rank.terms["parameters"] + rank.terms["gradients"] + experts
