"""The matrices of a rank's layers, against shapes written down by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from shapes import LLAMA3_8B, job_of

from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.job import Job, RankColumns, all_ranks
from llmlaunch.memory.weights import distinct_matrices, head_matrix, largest_matrices
from llmlaunch.models.sections import Mamba
from llmlaunch.models.shape import MlaShape, ModelShape, MoeShape

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


LAST = 32 * 128 * H


def test_the_shared_expert_and_the_routed_ones_have_the_same_matrices_where_they_are_as_wide() -> None:
    apart = replace(DEEPSEEK, moe=DEEPSEEK.moe and replace(DEEPSEEK.moe, shared_expert_ffn_hidden_size=1024))
    assert distinct(apart)[1] - distinct(DEEPSEEK)[1] == 3 * H * 1024


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


def test_the_largest_matrix_is_one_that_the_rank_has() -> None:
    """A dense MLP of the first stage is none of a later one, whose largest are experts, or what attention has."""
    dense, expert = values(largest_matrices, DEEPSEEK)
    assert dense == [2 * H * 14336, *[LAST] * 3]
    assert expert == [0, *[64 * 2 * H * 1792] * 3]
    spread = Layout(pipeline=4, data=64, expert=64)
    assert values(largest_matrices, DEEPSEEK, spread)[1] == [0, *[2 * H * 1792] * 3]
