"""What a rehearsal does to the verdict: what was seen takes the estimate's place, and no more than that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmlaunch.assets import asset
from llmlaunch.calibration.margins import Margin
from llmlaunch.memory.constants import constant
from llmlaunch.planner.plan import Plan
from llmlaunch.recipe.types import MemoryPolicy
from llmlaunch.rehearsal.ranks import RehearsedRank
from llmlaunch.rehearsal.verdict import ROUTING, WORKSPACE, Judgement, judge_plan, next_layout, unseen_by_a_trace
from llmlaunch.units import GIB
from llmlaunch.verdicts import SAFE
from support import rehearsed_plans
from support.rehearsed_plans import FOUR_STAGES, planned
from support.tight import judge_by

JOB = planned(FOUR_STAGES)
FUJII = Margin(round(0.8 * JOB.plan.limit.memory_bytes), JOB.plan.limit.memory_bytes, "by hand", "80 % of it")
SETTING, PLAN = JOB.setting, replace(JOB.plan, limit=FUJII)
UNSEEN = unseen_by_a_trace(SETTING.job_of(JOB.recipe), PLAN.layout)
FIRST = PLAN.estimate.ranks[0]
RULE = MemoryPolicy()


def traced(allocated_bytes: int, reserved_bytes: int | None = None) -> RehearsedRank:
    return rehearsed_plans.traced(JOB, allocated_bytes=allocated_bytes, reserved_bytes=reserved_bytes)


def on_gpu(process_bytes: int, ran_out: bool = False) -> RehearsedRank:
    return rehearsed_plans.on_gpu(JOB, process_bytes=process_bytes, ran_out=ran_out)


def said(*ranks: RehearsedRank, policy: MemoryPolicy = RULE, plan: Plan = PLAN) -> Judgement:
    return judge_plan(plan, ranks, policy, UNSEEN)


def test_nothing_rehearsed_is_the_plans_own_verdict() -> None:
    found = said()
    assert found.verdict == PLAN.verdict == "safe"
    assert [rank.device_bytes for rank in found.ranks] == [rank.device_bytes for rank in PLAN.estimate.ranks]


def test_a_trace_replaces_what_is_allocated_and_keeps_what_it_cannot_see() -> None:
    seen = FIRST.allocated_bytes + 3 * GIB
    rank = said(traced(seen)).ranks[0]
    assert rank.parts["allocated"] == seen
    assert rank.parts[WORKSPACE] == constant("workspace_bytes")
    kept = ("allocator_cache", "context", "communicators")
    assert {name: rank.parts[name] for name in kept} == {name: FIRST.terms[name] for name in kept}
    assert rank.device_bytes == FIRST.device_bytes + 3 * GIB + constant("workspace_bytes")


def test_a_replay_that_needs_more_cache_counts_and_one_that_needs_less_does_not() -> None:
    """No GPU has validated it: it may warn, and may not allow."""
    seen, usual = FIRST.allocated_bytes, FIRST.terms["allocator_cache"]
    assert said(traced(seen, seen)).ranks[0].parts["allocator_cache"] == usual
    assert said(traced(seen, seen + usual + GIB)).ranks[0].parts["allocator_cache"] == usual + GIB


def test_a_trace_never_loosens_the_limit() -> None:
    for allocated in (GIB, FIRST.allocated_bytes, 70 * GIB):
        assert {rank.limit_bytes for rank in said(traced(allocated)).ranks} == {PLAN.limit.limit_bytes}


def test_ranks_not_rehearsed_keep_estimate_and_limit() -> None:
    found = said(on_gpu(FIRST.device_bytes))
    for rank, predicted in list(zip(found.ranks, PLAN.estimate.ranks, strict=True))[1:]:
        assert (rank.device_bytes, rank.limit_bytes) == (predicted.device_bytes, PLAN.limit.limit_bytes)
        assert rank.rehearsed is None


def test_a_rank_speaks_for_those_that_hold_the_same() -> None:
    found = said(replace(traced(GIB), stands_for=(0, 2)))
    assert [rank.rehearsed is not None for rank in found.ranks] == [True, False, True, False]


def test_a_gpu_measures_all_but_nccl_and_leaves_less_to_keep_free() -> None:
    """On a card that nobody measured, where Fujii's rule decides."""
    by_rule = replace(PLAN, limit=replace(PLAN.limit, limit_bytes=int(0.8 * PLAN.limit.memory_bytes)))
    rank = said(on_gpu(66 * GIB), plan=by_rule).ranks[0]
    assert rank.device_bytes == 66 * GIB + FIRST.terms["communicators"]
    assert by_rule.limit.limit_bytes < rank.limit_bytes < PLAN.limit.memory_bytes - RULE.floor_bytes
    assert rank.verdict == SAFE, "the rule alone would refuse it"
    assert not said(on_gpu(72 * GIB), plan=by_rule).safe


@pytest.mark.parametrize("changed", [{"floor_gib": 30.0}, {"limit": 0.7}, {"limit": 0.95}], ids=str)
def test_a_gpu_takes_away_nothing_that_the_rule_allows_and_changes_no_limit_of_the_recipes_own(
    changed: dict[str, float],
) -> None:
    judgement = said(on_gpu(40 * GIB), policy=replace(RULE, **changed))
    assert judgement.ranks[0].limit_bytes == PLAN.limit.limit_bytes


def test_a_gpus_word_goes_before_a_traces() -> None:
    for order in ((traced(GIB), on_gpu(40 * GIB)), (on_gpu(40 * GIB), traced(GIB))):
        assert said(*order).ranks[0].parts["process"] == 40 * GIB


def test_out_of_memory_is_unsafe_whatever_it_had_reached_and_the_next_layout_has_more_room() -> None:
    found = said(on_gpu(10 * GIB, ran_out=True))
    assert not found.safe
    assert "pipeline rank 0 ran out of memory" in found.sentences
    following = next_layout(SETTING, PLAN, found)
    assert following is not None
    assert following.plan.chosen.device_bytes <= PLAN.chosen.device_bytes - 0.08 * PLAN.limit.memory_bytes


def test_more_than_the_limit_is_unsafe_and_the_next_layout_is_priced_as_rehearsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge_by(monkeypatch, FUJII)
    over = FIRST.allocated_bytes + PLAN.limit.limit_bytes - FIRST.device_bytes + GIB
    found = said(traced(over))
    assert (PLAN.verdict, found.verdict) == ("safe", "unsafe")
    following = next_layout(SETTING, PLAN, found)
    assert following is not None
    assert following.plan.layout != PLAN.layout
    assert following.plan.chosen.device_bytes <= PLAN.limit.limit_bytes
    assert following.plan.correction.torch_share > 0


def test_more_than_the_limit_that_fits_the_card_is_tight() -> None:
    plan = replace(PLAN, limit=replace(PLAN.limit, fits_bytes=PLAN.limit.limit_bytes + 2 * GIB))
    over = FIRST.allocated_bytes + PLAN.limit.limit_bytes - FIRST.device_bytes
    verdicts = [judge_plan(plan, [traced(over + size)], RULE, UNSEEN).verdict for size in (-GIB, GIB, 3 * GIB)]
    assert verdicts == ["safe", "tight", "unsafe"]
    tight = judge_plan(plan, [traced(over + GIB)], RULE, UNSEEN)
    assert any("GiB more than the limit, but fits the card" in sentence for sentence in tight.sentences)
    assert next_layout(SETTING, plan, tight) is not None, "the plan was safe by its estimate"
    assert next_layout(SETTING, replace(plan, verdict="tight"), tight) is None
    assert judge_plan(plan, [on_gpu(10 * GIB, ran_out=True)], RULE, UNSEEN).verdict == "unsafe"


def test_a_trace_may_show_that_the_estimate_was_too_high() -> None:
    limit = replace(PLAN.limit, limit_bytes=PLAN.estimate.worst.device_bytes - 1)
    plan = replace(PLAN, verdict="unsafe", limit=limit)
    assert not judge_plan(plan, [], RULE, UNSEEN).safe
    found = judge_plan(plan, [traced(FIRST.allocated_bytes - GIB)], RULE, UNSEEN)
    assert found.safe
    assert "the estimate alone said unsafe" in found.sentences


def test_a_host_that_overflows_stays_unsafe() -> None:
    assert PLAN.host_limit is not None
    plan = replace(PLAN, verdict="unsafe", host_limit=replace(PLAN.host_limit, limit_bytes=GIB))
    assert not judge_plan(plan, [traced(GIB)], RULE, UNSEEN).safe


def test_a_trace_routes_evenly_and_what_uneven_routing_takes_is_added() -> None:
    mixture = planned("nodes=8", recipe=str(asset("recipes", "mixtral-8x7b.yaml")))
    unseen = unseen_by_a_trace(mixture.setting.job_of(mixture.recipe), mixture.plan.layout)
    assert len(unseen) == mixture.plan.layout.pipeline
    assert all(rank[ROUTING] > 0 for rank in unseen)
    assert not any(ROUTING in rank for rank in UNSEEN)
