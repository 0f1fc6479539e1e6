"""Which ranks are run alone: the ones that decide, and each that differs from another."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest

from llmlaunch.assets import asset
from llmlaunch.errors import UserError
from llmlaunch.rehearsal.ranks import chosen_ranks
from support.rehearsed_plans import FOUR_STAGES, Planned, planned

job = cache(partial(planned, FOUR_STAGES))
few_in_flight = cache(partial(planned, FOUR_STAGES, "training.global_batch_size=2"))


def numbers(of: Planned, word: str) -> list[tuple[int, ...]]:
    return [(choice.pipeline_rank, *choice.stands_for) for choice in chosen_ranks(of.plan, of.recipe.model, word)]


def test_the_worst_is_the_rank_predicted_to_need_the_most() -> None:
    assert numbers(job(), "worst") == [(0, 0)]


@pytest.mark.parametrize(("share", "ran"), [(0.97, [0, 1]), (0.95, [0, 1]), (0.93, [0])])
def test_a_rank_too_near_the_worst_to_tell_which_is_worse_is_run_too(share: float, ran: list[int]) -> None:
    first, second, *others = job().plan.estimate.ranks
    near = replace(second, device_bytes=round(share * first.device_bytes))
    plan = replace(job().plan, estimate=replace(job().plan.estimate, ranks=(first, near, *others)))
    assert [number for number, *_ in numbers(replace(job(), plan=plan), "worst")] == ran


def test_all_runs_every_distinct_rank_once_for_those_like_it() -> None:
    """Of four stages with different numbers of micro-batches in flight none is like another; of those with one, the
    two in the middle are."""
    assert numbers(job(), "all") == [(rank, rank) for rank in range(4)]
    assert numbers(few_in_flight(), "all") == [(0, 0), (1, 1, 2), (3, 3)]
    assert numbers(few_in_flight(), "2") == [(2, 1, 2)]


def test_ranks_whose_experts_lie_elsewhere_are_not_alike() -> None:
    recipe = str(asset("recipes", "deepseek-v2-lite.yaml"))
    groups = numbers(planned("layout={pipeline: 3, virtual_pipeline: 1, tensor: 1}", "nodes=3", recipe=recipe), "all")
    assert sorted(rank for _, *alike in groups for rank in alike) == [0, 1, 2]
    assert all(rank == alike[0] for rank, *alike in groups)


@pytest.mark.parametrize("word", ["4", "-1", "1.5", "first", "", "٣", "9" * 30])
def test_a_rank_that_does_not_exist_is_refused_with_those_that_do(word: str) -> None:
    with pytest.raises(UserError, match=r"pipeline ranks are 0 to 3; or say worst or all"):
        numbers(job(), word)
