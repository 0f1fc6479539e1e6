"""The best split of layers over stages, against every split there is: by seconds alone, and as timing and memory say.

The split called the best has the fastest slowest stage of all that memory allows. Its step is then the fastest but for
the update, which waits for the stage with the most parameters: of splits at one pace, that of another may be shorter.
How many layers a rank can hold is asked of the estimator, and its answers are the limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmlaunch.frameworks.megatron.backend import MegatronLM
from llmlaunch.layers.model import model_of
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.estimator import estimate, worst_ranks
from llmlaunch.memory.job import NO_CORRECTION, Correction, Job
from llmlaunch.models.shape import MoeShape
from llmlaunch.planner.search_space import enumerate_splits
from llmlaunch.planner.setting import setting_of
from llmlaunch.planner.stage_balance import Costs, balance_alike, balance_kinds
from llmlaunch.planner.stage_capacities import MixtureCapacities, balance_leading, capacities, fitting, may_hold_all
from llmlaunch.planner.stage_search import balanced, balanced_within, costs_of
from llmlaunch.techniques import Techniques
from llmlaunch.timing.stages import stage_seconds, stages
from llmlaunch.timing.step import step_time
from llmlaunch.units import GIB
from support.recipes import recipe_of

Split = tuple[int, ...]

SMALL = recipe_of("llama3-8b")
SMALL_JOB = setting_of(SMALL, MegatronLM()).job
MIXTURE = recipe_of("mixtral-8x7b")
CORRECTIONS = [NO_CORRECTION, Correction(0.11, 3.0 * 2**30), Correction(-0.2, -0.7 * 2**30)]
UPDATE = 1e-3  # of the step: what the update may be longer
RECIPE = recipe_of("llama3-70b")
JOB = setting_of(RECIPE, MegatronLM()).job
LAYERS = RECIPE.model.num_layers


def every_split(layers: int, stages: int) -> Iterator[Split]:
    """All ways to cut so many layers into so many stages, none of them empty."""
    for cuts in combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in zip((0, *cuts), (*cuts, layers), strict=True))


def judged(split: Split, seconds: Sequence[int], first: int, last: int) -> tuple[int, int, Split]:
    """What the best split has the least of: the slowest rank, the squares of all, then the split itself."""
    ends = [sum(split[: i + 1]) for i in range(len(split))]
    stages = [sum(seconds[end - count : end]) for count, end in zip(split, ends, strict=True)]
    stages[0] += first
    stages[-1] += last
    return max(stages), sum(s * s for s in stages), split


@given(
    layers=st.integers(1, 9),
    pipeline=st.integers(1, 5),
    layer=st.integers(1, 5),
    first=st.integers(0, 12),
    last=st.integers(0, 12),
    caps=st.lists(st.integers(0, 9), min_size=5, max_size=5),
)
def test_alike_layers_are_split_as_the_best_of_all_splits(
    layers: int, pipeline: int, layer: int, first: int, last: int, caps: list[int]
) -> None:
    allowed = [s for s in every_split(layers, pipeline) if all(n <= c for n, c in zip(s, caps, strict=False))]
    best = min((judged(s, [layer] * layers, first, last) for s in allowed), default=None)
    columns = (np.array([float(value)]) for value in (layer, first, last))
    table, feasible = balance_alike(*columns, np.array([pipeline]), layers, np.array([caps]))
    assert feasible[0] == (best is not None)
    expected = () if best is None else best[2]
    assert tuple(table[0]) == (*expected, *(0,) * (5 - len(expected)))


@given(data=st.data(), rows=st.integers(1, 20))
def test_a_row_among_others_is_split_as_it_is_alone(data: st.DataObject, rows: int) -> None:
    number = st.integers(1, 8)
    columns = [np.array([float(data.draw(number)) for _ in range(rows)]) for _ in range(3)]
    pipeline = np.array([data.draw(number) for _ in range(rows)])
    caps = np.array([[data.draw(st.integers(1, 16)) for _ in range(8)] for _ in range(rows)])
    together, feasible = balance_alike(*columns, pipeline, 16, caps)
    for row in range(rows):
        one = slice(row, row + 1)
        alone, possible = balance_alike(*(c[one] for c in columns), pipeline[one], 16, caps[one])
        assert feasible[row] == possible[0]
        assert list(together[row]) == list(alone[0])


@given(
    kinds=st.one_of(
        st.lists(st.integers(1, 6), min_size=1, max_size=9),
        st.integers(1, 9).map(lambda n: [2, 5] * (n // 2) + [2] * (n % 2)),  # dense and mixture in turn
        st.integers(1, 6).map(lambda n: [2] * 3 + [5] * n),  # the first three dense
    ),
    pipeline=st.integers(1, 5),
    first=st.integers(0, 12),
    last=st.integers(0, 12),
    heaviest=st.lists(st.integers(3, 30), min_size=5, max_size=5),
)
def test_layers_of_any_kinds_are_split_as_the_best_of_all_splits(
    kinds: list[int], pipeline: int, first: int, last: int, heaviest: list[int]
) -> None:
    """Memory here goes by the kind of layer too, and binds some ranks earlier than others."""
    before = np.concatenate([[0], np.cumsum(kinds)])
    fits = np.array([before[None, :] - before[:, None] <= most for most in heaviest[:pipeline]])

    def allowed(split: Split) -> bool:
        ends = np.cumsum(split)
        return all(fits[r, ends[r] - split[r], ends[r]] for r in range(pipeline))

    splits = [judged(s, kinds, first, last) for s in every_split(len(kinds), pipeline) if allowed(s)]
    best = min(splits, default=None)
    assert balance_kinds(kinds, first, last, pipeline, fits) == (None if best is None else best[2])


@given(
    dense=st.integers(1, 4),
    mixtures=st.integers(1, 8),
    pipeline=st.integers(1, 6),
    seconds=st.tuples(*[st.integers(1, 6)] * 2, *[st.integers(0, 12)] * 2),
    caps=st.lists(st.tuples(*[st.integers(0, 9)] * 5), min_size=6, max_size=6),
    bound=st.booleans(),
)
@example(3, 2, 2, (3, 6, 7, 10), [(0,) * 5] * 2, False)  # ends at the same time that are no whole number of layers
def test_a_few_dense_layers_first_are_split_as_any_kinds_are(
    dense: int, mixtures: int, pipeline: int, seconds: tuple[int, ...], caps: list[tuple[int, ...]], bound: bool
) -> None:
    """With capacities as memory has them: the more dense layers a rank holds, the fewer mixtures."""
    most = [[cap[0] - sum(cap[1 : count + 1]) // 2 for count in range(dense + 1)] for cap in caps[:pipeline]]
    kinds = [0] * dense + [1] * mixtures
    layers = np.arange(dense + mixtures + 1)
    of_dense = np.clip(dense - layers[:, None], 0, None) - np.clip(dense - layers[None, :], 0, None)
    of_mixture = layers[None, :] - layers[:, None] - of_dense
    holds = [np.array(row)[np.clip(of_dense, 0, dense)] >= np.maximum(of_mixture, 0) for row in most]
    each = [float(seconds[kind]) for kind in kinds]
    fits = np.array(holds) if bound else None
    expected = balance_kinds(each, float(seconds[2]), float(seconds[3]), pipeline, fits)
    tables = [np.array([[row[count] for row in most]]) for count in range(dense + 1)]
    capacity = MixtureCapacities(tables[0], dict(enumerate(tables[1:], start=1))) if bound else None
    costs = Costs(*(np.array([float(value)]) for value in (*seconds, 0.0)))
    table, feasible = balance_leading(costs, np.array([pipeline]), (dense, mixtures), capacity)
    assert feasible[0] == (expected is not None)
    assert tuple(table[0].tolist()) == (expected or (0,) * pipeline)


def assert_best(job: Job, layout: Layout, split: Split | None, limit_bytes: float) -> None:
    """Of every split there is."""
    layouts = all_splits(job, layout)
    allowed = layouts.take(worst_ranks(job, layouts).device_bytes <= limit_bytes)
    assert (split is None) == (not len(allowed))
    if split is None:
        return
    chosen = LayoutColumns.of([replace(layout, layers_by_stage=split)])
    assert worst_ranks(job, chosen).device_bytes[0] <= limit_bytes
    assert slowest(job, chosen)[0] == pytest.approx(slowest(job, allowed).min(), rel=1e-12)
    fastest = step_time(job, SMALL.cluster, allowed).total.min()
    assert step_time(job, SMALL.cluster, chosen).total[0] <= (1 + UPDATE) * fastest


def all_splits(job: Job, layout: Layout) -> LayoutColumns:
    splits = every_split(job.shape.num_layers, layout.pipeline)
    return LayoutColumns.of([replace(layout, layers_by_stage=split) for split in splits])


def slowest(job: Job, layouts: LayoutColumns) -> NDArray[np.float64]:
    return stages(job, layouts, stage_seconds(job, SMALL.cluster, layouts)).slowest_seconds


def limit_of(job: Job, layout: Layout, share: float) -> float:
    """What the fastest split needs, times `share`: below 1 it does not fit."""
    layouts = all_splits(job, layout)
    return share * float(worst_ranks(job, layouts).device_bytes[slowest(job, layouts).argmin()])


@pytest.mark.parametrize("layers", [8, 10, 11])
@pytest.mark.parametrize("layout", [Layout(1, 2, data=4, zero_stage=1), Layout(1, 4, data=2, micro_batch_size=2)])
@pytest.mark.parametrize("share", [0.75, 0.9, 2.0])
@pytest.mark.parametrize("correction", CORRECTIONS, ids=["uncorrected", "more", "less"])
def test_alike_layers(layers: int, layout: Layout, share: float, correction: Correction) -> None:
    job = replace(SMALL_JOB, shape=replace(SMALL_JOB.shape, num_layers=layers), correction=correction)
    limit, columns = limit_of(job, layout, share), LayoutColumns.of([layout])
    costs, most = stage_seconds(job, SMALL.cluster, columns), capacities(job, columns, limit)
    table, feasible = balance_alike(costs.layers[0], costs.first, costs.last, columns.pipeline, layers, most)
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
    costs = stage_seconds(job, SMALL.cluster, columns)
    each = [float(costs.layers[kind][0]) for kind in model_of(shape).order]
    split = balance_kinds(each, float(costs.first[0]), float(costs.last[0]), 3, fitting(job, columns, limit))
    assert_best(job, layout, split, limit)


@pytest.mark.parametrize("share", [0.85, 2.0])
@pytest.mark.parametrize("kinds", ["dense", "leading", "in turn"])
def test_heads_before_the_loss_leave_it_a_stage_without_layers(kinds: str, share: float) -> None:
    """Of all ways to share the layers out over the ranks before it."""
    recipe = SMALL if kinds == "dense" else MIXTURE
    patterns = {"dense": (0,) * 9, "leading": (0, 0, *(1,) * 7), "in turn": (0, 1, 1) * 3}
    moe = recipe.model.moe and replace(recipe.model.moe, layer_pattern=patterns[kinds])
    shape = replace(recipe.model, num_layers=9, moe=moe, mtp_num_layers=1)
    usual = setting_of(recipe, MegatronLM()).job
    job = replace(usual, shape=shape, techniques=Techniques(mtp_stage="before-last"))
    layout = Layout(1, 4, data=8, expert=1 if moe is None else 8, zero_stage=1)
    splits = [(*split, 0) for split in every_split(9, 3)]
    layouts = LayoutColumns.of([replace(layout, layers_by_stage=split) for split in splits])
    bytes_, paces = worst_ranks(job, layouts).device_bytes, slowest(job, layouts)
    limit = share * float(bytes_[paces.argmin()])
    one = LayoutColumns.of([replace(layout, layers_by_stage=(3, 3, 3, 0))])
    _, cut = balanced_within(job, one, costs_of(job, SMALL.cluster, one), limit)
    assert bool(len(cut)) == bool(np.any(bytes_ <= limit))
    if len(cut):
        assert cut.row(0).layers_by_stage[-1] == 0
        assert worst_ranks(job, cut).device_bytes[0] <= limit
        assert slowest(job, cut)[0] == pytest.approx(paces[bytes_ <= limit].min(), rel=1e-12)
    free = balanced(job, one, costs_of(job, SMALL.cluster, one))
    assert slowest(job, free)[0] == pytest.approx(paces.min(), rel=1e-12)


def rank_bytes(job: Job, layout: Layout, rank: int, layers: int) -> int:
    """Device bytes of one rank with so many layers; its neighbours take the rest."""
    neighbour = rank + 1 if rank == 0 else rank - 1
    split = [1] * layout.pipeline
    split[rank] = layers
    split[neighbour] += job.shape.num_layers - sum(split)
    assert min(split) > 0
    return estimate(job, replace(layout, layers_by_stage=tuple(split))).ranks[rank].device_bytes


def assert_limits(job: Job, layout: Layout, limit_bytes: float) -> None:
    """No rank could hold one layer more, and each holds what it is said to hold."""
    for rank, most in enumerate(capacities(job, LayoutColumns.of([layout]), limit_bytes)[0].tolist()):
        assert most == 0 or rank_bytes(job, layout, rank, most) <= limit_bytes
        assert most == LAYERS - layout.pipeline + 1 or rank_bytes(job, layout, rank, most + 1) > limit_bytes


@settings(max_examples=12)
@given(
    pipeline=st.sampled_from([2, 3, 4, 8, 16]),
    tensor=st.sampled_from([1, 2, 8]),
    micro=st.sampled_from([1, 2, 4]),
    recompute=st.integers(0, 2),
    limit_gib=st.floats(5, 140),
    share=st.sampled_from([0.0, 0.07, -0.12, 0.6]),
    outside_gib=st.sampled_from([0.0, 2.5, -0.4, -9.0]),
)
def test_one_more_layer_would_not_fit(
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
    assert_limits(job, layout, limit_gib * GIB)


@pytest.mark.parametrize("method", ["uniform", "block"])
@pytest.mark.parametrize("limit", [20 * GIB, 40 * GIB, 70 * GIB])
def test_recompute_of_some_layers_is_asked_too(method: str, limit: int) -> None:
    job = replace(JOB, techniques=Techniques(recompute_method=method))
    layout = Layout(8, 4, data=16, zero_stage=1, sequence_parallel=1, recompute=2, recompute_layers=5)
    assert_limits(job, layout, limit)


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


@settings(max_examples=20)
@given(
    pipeline=st.sampled_from((34, 40, 64, 80)),
    tensor=st.sampled_from((1, 2, 8)),
    batch=st.sampled_from((16, 100, 512)),
    limit_gib=st.integers(5, 90),
)
def test_no_layout_that_holds_all_layers_is_left_out_by_its_few_ranks(
    pipeline: int, tensor: int, batch: int, limit_gib: int
) -> None:
    recipe = replace(RECIPE, training=replace(RECIPE.training, global_batch_size=batch))
    job = setting_of(recipe, MegatronLM()).job
    columns = LayoutColumns.of([Layout(tensor=tensor, pipeline=pipeline)])
    each = capacities(job, columns, limit_gib * GIB)[0]
    assert np.all(np.diff(each[1:-1]) >= 0)
    if np.all(each > 0) and each.sum() >= LAYERS:
        assert may_hold_all(job, columns, limit_gib * GIB).tolist() == [0]


def test_a_long_pipeline_without_room_is_left_out_by_its_few_ranks() -> None:
    columns = LayoutColumns.of([Layout(pipeline=80), Layout(tensor=8, pipeline=64), Layout(pipeline=2)])
    assert may_hold_all(JOB, columns, 10 * GIB).tolist() == [2]  # short ones are not asked
    assert may_hold_all(JOB, columns, 70 * GIB).tolist() == [1, 2]
