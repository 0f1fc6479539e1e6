"""The split that is called the best has the fastest slowest stage of all that memory allows, as timing and memory say.

Its step is then the fastest but for the update, which waits for the stage with the most parameters: of splits at one
pace, that of another may be shorter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from llmlaunch.backends.megatron.backend import MegatronLM
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.estimator import worst_ranks
from llmlaunch.memory.job import NO_CORRECTION, Correction, Job
from llmlaunch.planner.setting import setting_of
from llmlaunch.planner.stage_search import balance_alike, balance_kinds, capacities, fitting
from llmlaunch.timing.stages import stage_seconds, stages
from llmlaunch.timing.step import step_time
from support.recipes import recipe_of

RECIPE = recipe_of("llama3-8b")
JOB = setting_of(RECIPE, MegatronLM()).job
MIXTURE = recipe_of("mixtral-8x7b")
CORRECTIONS = [NO_CORRECTION, Correction(0.11, 3.0 * 2**30), Correction(-0.2, -0.7 * 2**30)]
UPDATE = 1e-3  # of the step: what the update may be longer


def every_split(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in zip((0, *cuts), (*cuts, layers), strict=True))


def assert_best(job: Job, layout: Layout, split: tuple[int, ...] | None, limit_bytes: float) -> None:
    """Of every split there is."""
    layouts = all_splits(job, layout)
    allowed = layouts.take(worst_ranks(job, layouts).device_bytes <= limit_bytes)
    assert (split is None) == (not len(allowed))
    if split is None:
        return
    chosen = LayoutColumns.of([replace(layout, layers_by_stage=split)])
    assert worst_ranks(job, chosen).device_bytes[0] <= limit_bytes
    assert slowest(job, chosen)[0] == pytest.approx(slowest(job, allowed).min(), rel=1e-12)
    fastest = step_time(job, RECIPE.cluster, allowed).total.min()
    assert step_time(job, RECIPE.cluster, chosen).total[0] <= (1 + UPDATE) * fastest


def all_splits(job: Job, layout: Layout) -> LayoutColumns:
    splits = every_split(job.shape.num_layers, layout.pipeline)
    return LayoutColumns.of([replace(layout, layers_by_stage=split) for split in splits])


def slowest(job: Job, layouts: LayoutColumns) -> NDArray[np.float64]:
    return stages(job, layouts, stage_seconds(job, RECIPE.cluster, layouts)).slowest_seconds


def limit_of(job: Job, layout: Layout, share: float) -> float:
    """What the fastest split needs, times `share`: below 1 it does not fit."""
    layouts = all_splits(job, layout)
    return share * float(worst_ranks(job, layouts).device_bytes[slowest(job, layouts).argmin()])


@pytest.mark.parametrize("layers", [8, 10, 11])
@pytest.mark.parametrize("layout", [Layout(1, 2, data=4, zero_stage=1), Layout(1, 4, data=2, micro_batch_size=2)])
@pytest.mark.parametrize("share", [0.75, 0.9, 2.0])
@pytest.mark.parametrize("correction", CORRECTIONS, ids=["uncorrected", "more", "less"])
def test_alike_layers(layers: int, layout: Layout, share: float, correction: Correction) -> None:
    job = replace(JOB, shape=replace(JOB.shape, num_layers=layers), correction=correction)
    limit, columns = limit_of(job, layout, share), LayoutColumns.of([layout])
    costs, most = stage_seconds(job, RECIPE.cluster, columns), capacities(job, columns, limit)
    table, feasible = balance_alike(costs.dense_layer, costs.first, costs.last, columns.pipeline, layers, most)
    assert_best(job, layout, tuple(table[0].tolist()) if feasible[0] else None, limit)


@pytest.mark.parametrize("pattern", [(0, 1) * 5, (0, 0, 0, *(1,) * 7), (1,) * 9])
@pytest.mark.parametrize("share", [0.8, 2.0])
@pytest.mark.parametrize("correction", CORRECTIONS, ids=["uncorrected", "more", "less"])
def test_dense_layers_and_mixtures(pattern: tuple[int, ...], share: float, correction: Correction) -> None:
    moe = MIXTURE.model.moe
    assert moe is not None
    shape = replace(MIXTURE.model, num_layers=len(pattern), moe=replace(moe, layer_pattern=pattern))
    job = replace(setting_of(MIXTURE, MegatronLM()).job, shape=shape, correction=correction)
    layout = Layout(1, 3, data=8, expert=8, zero_stage=1)
    limit, columns = limit_of(job, layout, share), LayoutColumns.of([layout])
    costs = stage_seconds(job, RECIPE.cluster, columns)
    each = [float((costs.mixture_layer if flag else costs.dense_layer)[0]) for flag in pattern]
    split = balance_kinds(each, float(costs.first[0]), float(costs.last[0]), 3, fitting(job, columns, limit))
    assert_best(job, layout, split, limit)
