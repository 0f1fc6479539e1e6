"""No cut of the layers makes the fullest rank need less than the floor says."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from test_memory_laws import CORRECTIONS

from llmlaunch.assets import asset
from llmlaunch.backends.registry import backend_for
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.correction import Correction
from llmlaunch.memory.estimator import worst_ranks
from llmlaunch.memory.job import Job
from llmlaunch.memory.states import least_state_bytes
from llmlaunch.recipe.load import load_recipe


def job(name: str) -> Job:
    recipe = load_recipe(asset("recipes", f"{name}.yaml"))
    return Job(recipe.model, recipe.workload, backend_for(recipe).facts(recipe))


JOBS = {name: job(name) for name in ("llama3-8b", "mixtral-8x7b")}


@given(
    name=st.sampled_from(sorted(JOBS)),
    pipeline=st.integers(2, 6),
    tensor=st.sampled_from([1, 2]),
    data=st.data(),
    correction=CORRECTIONS,
)
def test_every_cut_needs_at_least_the_floor(
    name: str, pipeline: int, tensor: int, data: st.DataObject, correction: Correction
) -> None:
    job = replace(JOBS[name], correction=correction)
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
