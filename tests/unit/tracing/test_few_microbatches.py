"""As many micro-batches as a schedule's warm-up and one period take, on each rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from llmlaunch.tracing import few_microbatches as few


def arguments(stages: int, chunks: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks,
        microbatch_group_size_per_vp_stage=None,
    )


@pytest.mark.parametrize(
    ("stages", "chunks", "rank", "full", "enough"),
    [
        (1, None, 0, 1, 3),  # one in flight
        (4, None, 0, 4, 6),  # as many in flight as stages
        (4, None, 3, 1, 3),
        (2, 3, 0, 4, 6),  # 6 passes of warm-up and 6 of a period, in groups of 2 through 3 chunks
        (4, 5, 0, 8, 12),
        (4, 5, 3, 4, 8),
    ],
)
def test_they_depend_on_the_schedule_and_the_rank(
    stages: int, chunks: int | None, rank: int, full: int, enough: int
) -> None:
    args = arguments(stages, chunks)
    assert (few.full_microbatches(args, rank), few.enough_microbatches(args, rank)) == (full, enough)


@pytest.mark.parametrize("chunks", [2, 3, 6, 14])
@pytest.mark.parametrize("stages", [2, 4, 8, 16])
def test_interleaved_chunks_take_whole_groups_and_have_a_steady_part(stages: int, chunks: int) -> None:
    args = arguments(stages, chunks)
    for rank in range(stages):
        count = few.enough_microbatches(args, rank)
        warm_up = (stages - rank - 1) * 2 + (chunks - 1) * stages
        assert count % stages == 0
        assert stages * chunks < count * chunks - warm_up <= 2 * stages * chunks
        assert few.full_microbatches(args, rank) <= count
