"""The matrices of a rank's layers, against shapes written down by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from random_jobs import SHARED
from shapes import LLAMA3_8B, MIXTRAL, job_of

from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.job import Job, RankColumns, all_ranks
from llmlaunch.memory.weights import distinct_matrices, head_matrix, largest_matrices
from llmlaunch.models.sections import Mamba
from llmlaunch.models.shape import Indexer, LinearAttention, MlaShape, ModelShape, MoeShape

H = 4096
STAGES = Layout(pipeline=4, data=2)
DEEPSEEK = replace(
    LLAMA3_8B,
    num_layers=8,
    num_query_groups=32,
    mla=MlaShape(1536, 512, 128, 64, 128),
    moe=MoeShape(64, 8, 1792, 1792, (0, 0, 1, 1, 1, 1, 1, 1)),
)


def values(
    function: Callable[[Job, RankColumns], Any], shape: ModelShape, layout: Layout = STAGES
) -> list[list[float]]:
    """Return one list of ranks for each column."""
    job = job_of(shape, layout)
    columns = function(job, all_ranks(job, LayoutColumns.of([layout])))
    return [np.asarray(column).tolist() for column in (columns if isinstance(columns, tuple) else (columns,))]


def distinct_of_layers(job: Job, rows: RankColumns) -> Any:
    return distinct_matrices(job, rows) - head_matrix(job, rows)


def distinct(shape: ModelShape, layout: Layout = STAGES) -> list[float]:
    return values(distinct_of_layers, shape, layout)[0]


LATENTS = H * 1536 + 1536 * 32 * 192 + H * 576 + 512 * 32 * 256
LAST = 32 * 128 * H


def test_norms_of_latents_are_no_matrices() -> None:
    assert distinct(DEEPSEEK) == [LATENTS + LAST + 3 * H * 14336, *[LATENTS + LAST + 3 * H * 1792] * 3]


def test_the_shared_expert_and_the_routed_ones_have_the_same_matrices_where_they_are_as_wide() -> None:
    apart = replace(DEEPSEEK, moe=DEEPSEEK.moe and replace(DEEPSEEK.moe, shared_expert_ffn_hidden_size=1024))
    assert distinct(apart)[1] - distinct(DEEPSEEK)[1] == 3 * H * 1024


def test_equal_shapes_of_different_blocks_are_one() -> None:
    """The projection behind attention and the second matrix of an MLP that is as wide."""
    shape = replace(LLAMA3_8B, ffn_hidden_size=4096)
    assert distinct(shape)[0] == H * (4096 + 2 * 1024) + H * H + 2 * H * H
    assert distinct(replace(shape, ffn_hidden_size=8192))[0] == H * 6144 + H * H + 3 * H * 8192


def test_few_groups_are_repeated_on_every_tensor_rank() -> None:
    layout = Layout(tensor=16)
    assert distinct(LLAMA3_8B, layout)[0] == H * (4096 / 16 + 2 * 128) + H * 4096 / 16 + 3 * H * 14336 / 16


def test_a_rank_has_the_matrices_of_its_own_parts_alone() -> None:
    mamba = Mamba("MM**--EE", 64)
    shape = replace(LLAMA3_8B, num_layers=8, mamba=mamba, moe=MoeShape(8, 2, 1024, 0, (0, 0, 0, 0, 0, 0, 1, 1)))
    inner = 64 * 64
    projected = inner + (inner + 2 * 8 * 128) + 64  # the gate, what is convolved, a step of each head
    mixer = H * (projected + inner)
    attention, mlp, experts = H * 6144 + H * H, 3 * H * 14336, 3 * H * 1024
    assert distinct(shape) == [mixer, attention, mlp, experts]
    assert values(largest_matrices, shape) == [
        [H * projected, H * 6144, 2 * H * 14336, 0],
        [0, 0, 0, 8 * 2 * H * 1024],
    ]


def test_delta_nets_have_their_own() -> None:
    shape = replace(LLAMA3_8B, num_layers=8, linear_attention=LinearAttention(4, 32, 128))
    keys, values_ = 32 * 128, 128 * 128
    nets = H * ((2 * keys + values_) + values_ + 2 * 128 + values_)
    both = H * 6144 + H * H
    assert distinct(shape) == [x + 3 * H * 14336 for x in (nets, nets + both, nets, nets + both)]


def test_an_indexer_is_counted_whole_but_for_the_norm_of_its_key() -> None:
    moe = DEEPSEEK.moe and replace(DEEPSEEK.moe, layer_pattern=(1,) * 8)
    plain = replace(DEEPSEEK, moe=moe)
    more = distinct(replace(plain, indexer=Indexer(64, 128, 2048)))[0] - distinct(plain)[0]
    assert more == 1536 * 64 * 128 + H * (128 + 64)


def test_the_largest_matrix_is_one_that_the_rank_has() -> None:
    """A dense MLP of the first stage is none of a later one, whose largest are experts, or what attention has."""
    dense, expert = values(largest_matrices, DEEPSEEK)
    assert dense == [2 * H * 14336, *[LAST] * 3]
    assert expert == [0, *[64 * 2 * H * 1792] * 3]
    spread = Layout(pipeline=4, data=64, expert=64)
    assert values(largest_matrices, DEEPSEEK, spread)[1] == [0, *[2 * H * 1792] * 3]


def test_experts_are_split_by_their_own_tensor_ranks() -> None:
    layout = Layout(tensor=4, data=2, expert_tensor=2, expert=4)
    assert values(largest_matrices, MIXTRAL, layout) == [[H * 6144 / 4], [2 * 2 * H * 14336 / 2]]


@pytest.mark.parametrize("heads", [0, 1])
def test_prediction_heads_bring_their_layers(heads: int) -> None:
    pattern = (0,) * 11 + (1,)
    shape = replace(SHARED, mtp_num_layers=heads, moe=replace(SHARED.moe, layer_pattern=pattern))
    uneven = Layout(pipeline=3, data=2, layers_by_stage=(6, 6, 0))
    dense, expert = values(largest_matrices, shape, uneven)
    assert (dense[2] > 0, expert[2] > 0) == (bool(heads), bool(heads))


def test_a_rank_without_layers_has_no_matrices() -> None:
    assert distinct(LLAMA3_8B, Layout(pipeline=2, data=2, layers_by_stage=(32, 0)))[1] == 0


def test_layouts_priced_together_are_priced_as_each_alone() -> None:
    layouts = [Layout(tensor=t, data=8, expert_tensor=e) for t, e in ((1, 1), (4, 1), (4, 2), (2, 2), (4, 1))]
    job = job_of(MIXTRAL, layouts[0])
    together = largest_matrices(job, all_ranks(job, LayoutColumns.of(layouts)))
    alone = [values(largest_matrices, MIXTRAL, layout) for layout in layouts]
    assert [each.tolist() for each in together] == [[each[kind][0] for each in alone] for kind in range(2)]
    elements = distinct_of_layers(job, all_ranks(job, LayoutColumns.of(layouts)))
    assert elements.tolist() == [distinct(MIXTRAL, layout)[0] for layout in layouts]
