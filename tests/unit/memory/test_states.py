"""No cut of the layers makes the fullest rank need less than the floor says."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from shapes import CORRECTIONS

from llmlaunch.backends.registry import backend_for
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.estimator import worst_ranks
from llmlaunch.memory.job import Correction, Job
from llmlaunch.memory.states import least_state_bytes
from support.recipes import recipe_of

RECIPES = [recipe_of(name) for name in ("llama3-8b", "mixtral-8x7b")]
JOBS = [Job(recipe.model, recipe.workload, backend_for(recipe).facts(recipe)) for recipe in RECIPES]


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
