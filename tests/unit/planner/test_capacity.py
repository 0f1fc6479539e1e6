"""How many layers a rank can hold: the estimator is asked, and its answers are the limit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlaunch.backends.megatron.backend import MegatronLM
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.estimator import estimate
from llmlaunch.memory.job import Correction, Job
from llmlaunch.models.shape import MoeShape
from llmlaunch.planner.search_space import enumerate_splits
from llmlaunch.planner.setting import setting_of
from llmlaunch.planner.stage_search import balance_kinds, capacities, fitting
from llmlaunch.techniques import Techniques
from llmlaunch.units import GIB
from support.recipes import recipe_of

RECIPE = recipe_of("llama3-70b")
JOB = setting_of(RECIPE, MegatronLM()).job
LAYERS = RECIPE.model.num_layers


def rank_bytes(job: Job, layout: Layout, rank: int, layers: int) -> int:
    """Device bytes of one rank with so many layers; its neighbours take the rest."""
    neighbour = rank + 1 if rank == 0 else rank - 1
    split = [1] * layout.pipeline
    split[rank] = layers
    split[neighbour] += job.shape.num_layers - sum(split)
    assert min(split) > 0
    return estimate(job, replace(layout, layers_by_stage=tuple(split))).ranks[rank].device_bytes


@settings(max_examples=40)
@given(
    data=st.data(),
    pipeline=st.sampled_from([2, 3, 4, 8, 16]),
    tensor=st.sampled_from([1, 2, 8]),
    micro=st.sampled_from([1, 2, 4]),
    recompute=st.integers(0, 2),
    limit_gib=st.floats(5, 140),
    share=st.sampled_from([0.0, 0.07, -0.12, 0.6]),
    outside_gib=st.sampled_from([0.0, 2.5, -0.4, -9.0]),
)
def test_one_more_layer_would_not_fit(
    data: st.DataObject,
    pipeline: int,
    tensor: int,
    micro: int,
    recompute: int,
    limit_gib: float,
    share: float,
    outside_gib: float,
) -> None:
    job = replace(JOB, correction=Correction(share, outside_gib * GIB))
    layout = Layout(tensor, pipeline, data=8, micro_batch_size=micro, zero_stage=1, recompute=recompute)
    limit = limit_gib * GIB
    rank = data.draw(st.integers(0, pipeline - 1))
    most = int(capacities(job, LayoutColumns.of([layout]), limit)[0, rank])
    top = LAYERS - pipeline + 1
    assert most == 0 or rank_bytes(job, layout, rank, most) <= limit
    assert most == top or rank_bytes(job, layout, rank, most + 1) > limit


@pytest.mark.parametrize("method", ["uniform", "block"])
def test_recompute_of_some_layers_is_asked_too(method: str) -> None:
    job = replace(JOB, techniques=Techniques(recompute_method=method))
    layout = Layout(8, 4, data=16, zero_stage=1, sequence_parallel=1, recompute=2, recompute_layers=5)
    for limit in (20 * GIB, 40 * GIB, 70 * GIB):
        for rank, most in enumerate(capacities(job, LayoutColumns.of([layout]), limit)[0]):
            assert most == 0 or rank_bytes(job, layout, rank, int(most)) <= limit
            assert most == LAYERS - 3 or rank_bytes(job, layout, rank, int(most) + 1) > limit


def test_many_layouts_at_once_are_each_as_alone() -> None:
    layouts = enumerate_splits(RECIPE, MegatronLM().space(RECIPE))
    layouts = layouts.take((layouts.virtual_pipeline == 1) & (layouts.pipeline > 1))
    layouts = layouts.take(np.arange(0, len(layouts), 23))
    together = capacities(JOB, layouts, 60 * GIB)
    assert len(layouts) > 50
    for i in range(0, len(layouts), 11):
        alone = capacities(JOB, layouts.take(slice(i, i + 1)), 60 * GIB)[0]
        assert list(together[i]) == [*alone, *[0] * (together.shape[1] - len(alone))]


def test_layers_of_two_kinds_are_each_counted() -> None:
    """The table says of every stage what the estimator says of a layout with that stage."""
    pattern = (0, 0, 0, *(1,) * 9)
    moe = MoeShape(8, 2, 14336, 0, pattern)
    correction = Correction(torch_share=-0.05, outside_bytes=1.5 * GIB)
    job = replace(JOB, shape=replace(RECIPE.model, num_layers=12, moe=moe), correction=correction)
    layout = Layout(8, 3, data=2, sequence_parallel=1, zero_stage=1)
    fits = fitting(job, LayoutColumns.of([layout]), 60 * GIB)
    assert fits.shape == (3, 13, 13)
    assert 0 < np.count_nonzero(fits) < np.count_nonzero(np.triu(np.ones((13, 13)), 1)) * 3
    for a in range(1, 12):
        for b in range(a + 1, 12):
            ranks = estimate(job, replace(layout, layers_by_stage=(a, b - a, 12 - b))).ranks
            fitted = [rank.device_bytes <= 60 * GIB for rank in ranks]
            assert fitted == [fits[0, 0, a], fits[1, a, b], fits[2, b, 12]]


def test_early_ranks_that_keep_many_micro_batches_get_fewer_layers_where_memory_binds() -> None:
    layout = Layout(8, 4, data=1, sequence_parallel=1, micro_batch_size=4)
    columns = LayoutColumns.of([layout])
    limit = 1.02 * estimate(JOB, replace(layout, layers_by_stage=(17, 18, 22, 23))).worst.device_bytes
    most = capacities(JOB, columns, limit)[0]
    assert list(most) == sorted(most)
    split = balance_kinds([1.0] * LAYERS, 0.0, 0.0, 4, fitting(JOB, columns, limit))
    assert split is not None
    assert split != (20, 20, 20, 20)
    assert estimate(JOB, replace(layout, layers_by_stage=split)).worst.device_bytes <= limit


def test_interleaved_layouts_are_not_asked_about() -> None:
    with pytest.raises(ValueError, match="one chunk"):
        capacities(JOB, LayoutColumns.of([Layout(8, 4, virtual_pipeline=5, data=16)]), 60 * GIB)


def test_named_stages_narrow_the_search_to_them() -> None:
    named = "layout={layers_by_stage: [13, 14, 14, 14, 14, 11]}"
    recipe = recipe_of("llama3-70b", named, "nodes=12", "training.global_batch_size=480")
    layouts = enumerate_splits(recipe, MegatronLM().space(recipe))
    sizes = {(int(p), int(v)) for p, v in zip(layouts.pipeline, layouts.virtual_pipeline, strict=True)}
    assert sizes == {(6, 1), (3, 2), (2, 3), (1, 6)}
    assert np.all(layouts.uneven)
    assert layouts.row(0).layers_by_stage == (13, 14, 14, 14, 14, 11)
