"""Uneven stages in the words Megatron-LM takes: the plainest of its four ways that says exactly the plan.

What Megatron core makes of these words is in tests/frameworks/test_megatron_layers.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmlaunch.backends.megatron.arguments import STAGE_FLAGS, stage_flags
from llmlaunch.backends.megatron.backend import MegatronLM
from llmlaunch.backends.megatron.rules import RULES
from llmlaunch.errors import UserError
from llmlaunch.layout import Layout
from support.backend_output import refused_by, value_of, words_of
from support.recipes import recipe_of

STAGE_RULES = ("layers", "virtual-layers", "stages-named", "stages-hold-all", "stages-hold-some")
SPLIT = Layout(8, 4, data=16, sequence_parallel=1, zero_stage=1)


def flags_of_stages(pipeline: int, chunks: int, split: tuple[int, ...], mtp_layers: int = 0) -> str:
    return " ".join(stage_flags(Layout(pipeline=pipeline, virtual_pipeline=chunks, layers_by_stage=split), mtp_layers))


@pytest.mark.parametrize(
    ("pipeline", "chunks", "split", "flags"),
    [
        (4, 1, (), ""),
        (4, 1, (20, 20, 20, 20), ""),
        (4, 2, (), "--num-virtual-stages-per-pipeline-rank 2"),
        (4, 1, (19, 21, 21, 19), "--decoder-first-pipeline-num-layers 19 --decoder-last-pipeline-num-layers 19"),
        (4, 1, (20, 20, 20, 17), "--decoder-last-pipeline-num-layers 17"),
        (2, 1, (41, 39), "--decoder-first-pipeline-num-layers 41"),
        (2, 2, (8, 12, 8, 12), "--decoder-first-pipeline-num-layers 16 --num-virtual-stages-per-pipeline-rank 2"),
        (
            3,
            2,
            (4, 5, 3, 4, 5, 3),
            "--decoder-first-pipeline-num-layers 8 --decoder-last-pipeline-num-layers 6 "
            "--num-virtual-stages-per-pipeline-rank 2",
        ),
        (
            4,
            2,
            (9, 10, 10, 10, 10, 10, 10, 9),
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
            "--num-virtual-stages-per-pipeline-rank 2",
        ),
        (2, 2, (2, 2, 2, 1), "--account-for-loss-in-pipeline-split --num-virtual-stages-per-pipeline-rank 2"),
        (4, 1, (20, 21, 20, 19), "--pipeline-model-parallel-layout Et*20|t*21|t*20|t*19L"),
        (2, 2, (1, 2, 2, 3), "--pipeline-model-parallel-layout Et|(tt|)*2t*3L"),
        (2, 2, (3, 3, 2, 0), "--pipeline-model-parallel-layout Et*3|t*3|tt|L"),
    ],
)
def test_the_plainest_way_is_taken(pipeline: int, chunks: int, split: tuple[int, ...], flags: str) -> None:
    assert flags_of_stages(pipeline, chunks, split) == flags


def test_prediction_heads_stand_before_the_loss() -> None:
    ends = "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2"
    assert flags_of_stages(4, 1, (3, 4, 4, 2), mtp_layers=1) == ends
    assert flags_of_stages(4, 1, (3, 5, 4, 1), mtp_layers=1) == "--pipeline-model-parallel-layout Et*3|t*5|t*4|tmL"


@pytest.mark.parametrize(
    ("layout", "keys"),
    [
        (Layout(pipeline=4), set()),
        (Layout(pipeline=6), {"layers", "virtual-layers"}),
        (Layout(pipeline=6, layers_by_stage=(13, 14, 14, 14, 14, 11)), set()),
        (Layout(pipeline=6, layers_by_stage=(40, 40)), {"stages-named"}),
        (Layout(pipeline=2, layers_by_stage=(41, 40)), {"stages-hold-all"}),
        (Layout(pipeline=3, layers_by_stage=(40, 0, 40)), {"stages-hold-some"}),
        (Layout(pipeline=2, layers_by_stage=(80, 0)), {"stages-hold-some"}),
        (Layout(pipeline=2, virtual_pipeline=2, layers_by_stage=(0, 40, 40, 0)), set()),
        (Layout(pipeline=2, virtual_pipeline=2, layers_by_stage=(40, 0, 0, 40)), {"stages-hold-some"}),
    ],
)
def test_uneven_stages_need_no_divisor_but_must_add_up(layout: Layout, keys: set[str]) -> None:
    stage_rules = [rule for rule in RULES if rule.key in STAGE_RULES]
    assert refused_by(recipe_of("llama3-70b"), layout, stage_rules) == keys


def test_a_job_of_uneven_stages_is_rendered_with_their_flags() -> None:
    words = words_of(recipe_of("llama3-70b"), replace(SPLIT, layers_by_stage=(20, 21, 20, 19)))
    assert [flag for flag in STAGE_FLAGS if flag in words] == ["--pipeline-model-parallel-layout"]
    assert value_of(words, "--pipeline-model-parallel-layout") == "Et*20|t*21|t*20|t*19L"


@pytest.mark.parametrize("flag", STAGE_FLAGS)
def test_the_layers_are_not_split_otherwise_beside_the_plan(flag: str) -> None:
    recipe = recipe_of("llama3-70b", f"backend={{name: megatron-lm, extra_args: [{flag}=2]}}")
    with pytest.raises(UserError, match=flag):
        MegatronLM().render(recipe, SPLIT)
