"""Real Megatron core builds the stages a plan says: its parser, its checks and its layers of every rank and chunk."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judges import MegatronJudge, Verdict

from llmlaunch.assets import asset
from llmlaunch.frameworks.megatron.flags.layout import stage_flags
from llmlaunch.layout import Layout
from llmlaunch.recipe.load import load_recipe
from llmlaunch.techniques import Techniques
from support.backend_output import words_of
from support.soak import SOAK

pytestmark = pytest.mark.frameworks

DENSE = load_recipe(asset("recipes", "llama3-8b.yaml"), ())
MIXTURE = load_recipe(asset("recipes", "mixtral-8x7b.yaml"), ())

Split = tuple[int, ...]


def laid_out(megatron: MegatronJudge, layout: Layout, words: list[str]) -> Verdict:
    return megatron(layout.world_size, words, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, until="stages")


def words_for(layout: Layout, pattern: Split, mtp_layers: int, before: bool = False) -> list[str]:
    """All words of a small model's run: a mixture where the pattern has one."""
    recipe = MIXTURE if any(pattern) else DENSE
    recipe = replace(recipe, techniques=Techniques(mtp_stage="before-last")) if before else recipe
    shape = replace(recipe.model, num_layers=len(pattern), mtp_num_layers=mtp_layers)
    if shape.moe is not None:
        shape = replace(shape, moe=replace(shape.moe, layer_pattern=pattern))
    return words_of(replace(recipe, model=shape), layout)[1:]


def planned(layout: Layout, pattern: Split, mtp_layers: int, before: bool = False) -> list[list[object]]:
    """Rank, chunk, first layer, kinds of the layers and prediction heads, as the judge says them."""
    p, split = layout.pipeline, layout.layers_by_stage
    starts = [0, *accumulate(split)]
    stages: list[list[object]] = []
    for rank in range(p):
        for chunk in range(layout.virtual_pipeline):
            stage = chunk * p + rank
            kinds = ["mixture" if flag else "dense" for flag in pattern[starts[stage] : starts[stage + 1]]]
            heads = mtp_layers if stage == len(split) - 1 - before else 0
            stages.append([rank, chunk, starts[stage], kinds, heads])
    return stages


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Splits of every way Megatron can be told of: by ranks, with slots for embedding and loss, and any other."""
    pipeline, chunks = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    stages = pipeline * chunks
    way = draw(st.sampled_from(["ranks", "slots", "any", "any"]))
    size = st.integers(1, 5)
    if way == "ranks":
        usual = draw(size)
        split = (draw(size), *(usual,) * (pipeline - 2), draw(size)) * chunks
    elif way == "slots":
        usual = draw(st.integers(2, 4))
        split = (usual - draw(st.integers(0, 1)), *(usual,) * (stages - 2), usual - draw(st.integers(0, 1)))
    else:
        end = size if chunks == 1 else st.integers(0, 5)
        between = st.lists(size, min_size=stages - 2, max_size=stages - 2)
        split = (draw(end), *draw(between), draw(end))
    return Layout(pipeline=pipeline, virtual_pipeline=chunks, data=2, layers_by_stage=split)


def patterns(layers: int) -> st.SearchStrategy[Split]:
    """No mixtures, in turn, after the first three, or anywhere."""
    given_ones = [(0,) * layers, tuple(i % 2 for i in range(layers)), tuple(int(i > 2) for i in range(layers))]
    anywhere = st.lists(st.integers(0, 1), min_size=layers, max_size=layers).map(tuple)
    return st.one_of(st.sampled_from(given_ones), anywhere)


@settings(max_examples=60 if SOAK else 4)
@given(data=st.data(), layout=layouts(), mtp_layers=st.sampled_from([0, 0, 1, 2]))
def test_every_rank_and_chunk_builds_the_layers_of_the_plan(
    data: st.DataObject, layout: Layout, mtp_layers: int, megatron: MegatronJudge
) -> None:
    pattern = data.draw(patterns(sum(layout.layers_by_stage)))
    answer = laid_out(megatron, layout, words_for(layout, pattern, mtp_layers))
    assert answer == Verdict(None, stages=tuple(planned(layout, pattern, mtp_layers)))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pipeline=3, layers_by_stage=(3, 2, 0)),
        Layout(pipeline=3, layers_by_stage=(3, 0, 0)),
        Layout(pipeline=3, virtual_pipeline=2, layers_by_stage=(0, 1, 2, 1, 0, 0)),
    ],
)
def test_prediction_heads_lie_before_the_stage_of_the_loss(layout: Layout, recorded_megatron: MegatronJudge) -> None:
    pattern = (0,) * sum(layout.layers_by_stage)
    answer = laid_out(recorded_megatron, layout, words_for(layout, pattern, 1, before=True))
    assert answer == Verdict(None, stages=tuple(planned(layout, pattern, 1, before=True)))


@pytest.mark.parametrize(
    ("layout", "flag"),
    [
        (Layout(pipeline=4, layers_by_stage=(3, 4, 4, 2)), "--decoder-first-pipeline-num-layers"),
        (Layout(pipeline=2, virtual_pipeline=2, layers_by_stage=(2, 3, 2, 3)), "--decoder-first-pipeline-num-layers"),
        (
            Layout(pipeline=2, virtual_pipeline=2, layers_by_stage=(2, 3, 3, 2)),
            "--account-for-embedding-in-pipeline-split",
        ),
        (Layout(pipeline=2, virtual_pipeline=2, layers_by_stage=(2, 1, 3, 2)), "--pipeline-model-parallel-layout"),
    ],
)
def test_every_way_is_among_those_tried(layout: Layout, flag: str, recorded_megatron: MegatronJudge) -> None:
    assert flag in stage_flags(layout)
    pattern = (0,) * sum(layout.layers_by_stage)
    assert laid_out(recorded_megatron, layout, words_for(layout, pattern, 0)).stages == tuple(
        planned(layout, pattern, 0)
    )


@pytest.mark.parametrize(
    ("how", "flags"),
    [
        ((), set()),
        (
            ("training.async_save=true", "training.non_persistent_save_interval=20"),
            {"--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "--non-persistent-ckpt-type"},
        ),
    ],
)
def test_megatron_takes_the_words_of_a_run_that_saves_at_a_signal(
    how: tuple[str, ...], flags: set[str], recorded_megatron: MegatronJudge
) -> None:
    saving = ("training.save_interval=100", "training.checkpoint_path=/ckpt", "on_oom=fallback", *how)
    recipe = load_recipe(asset("recipes", "llama3-8b.yaml"), saving)
    layout = Layout(tensor=2, pipeline=2, data=8, sequence_parallel=1, zero_stage=1)
    words = words_of(recipe, layout)[1:]
    assert {"--exit-signal-handler", "--dist-ckpt-optim-fully-reshardable"} | flags <= set(words)
    assert laid_out(recorded_megatron, layout, words).accepted


FIRST, LAST = ("--decoder-first-pipeline-num-layers", "4"), ("--decoder-last-pipeline-num-layers", "4")
SLOT, WRITTEN = ("--account-for-loss-in-pipeline-split",), ("--pipeline-model-parallel-layout", "Et*4|t*4L")
CHUNKS = ("--num-virtual-stages-per-pipeline-rank", "2")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((*FIRST, *SLOT), "set at the same time"),
        ((*FIRST, *WRITTEN), "cannot be set with other pipeline layout arguments"),
        ((*SLOT, *WRITTEN), "cannot be set with other pipeline layout arguments"),
        ((*CHUNKS, *WRITTEN), "No more than one of the following arguments"),
        ((*FIRST, *LAST, *CHUNKS), "ZeroDivisionError"),  # why two ranks are told of the first alone
        (("--pipeline-model-parallel-layout", "Et*4|t*3L"), "must match num_layers"),
        (("--decoder-first-pipeline-num-layers", "0"), "must be larger than 0"),
    ],
)
def test_the_ways_exclude_each_other(words: tuple[str, ...], why: str, recorded_megatron: MegatronJudge) -> None:
    """What the rules and the renderer are for."""
    even = Layout(pipeline=2, data=2)
    answer = laid_out(recorded_megatron, even, [*words_for(even, (0,) * 8, 0), *words])
    assert why in answer.error
