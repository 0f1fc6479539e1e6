"""Advice costs no more than its budget of candidates, which is counted and never timed, and says where it ended."""

from __future__ import annotations

import pytest

from llmlaunch.planner import hints, neighbours, no_legal_layout, smallest_change
from llmlaunch.planner.no_legal_layout import no_layout
from llmlaunch.planner.plan import as_planned
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.search import search
from llmlaunch.planner.setting import BudgetSpent, PricingBudget, count_candidates
from llmlaunch.planner.smallest_change import CUT_SHORT, find_advice
from llmlaunch.progress import heard_by
from support.plans import gallery_setting

TIGHT = ("nodes=1", "layout={tensor: 1, pipeline: 1}", "cluster=a100-40gb-x8")


def spent_by(setting_name: str, *overrides: str) -> float:
    budget = PricingBudget(1e12)
    with budget.limiting():
        search(gallery_setting(setting_name, *overrides))
    return 1e12 - budget.left


def test_a_search_counts_the_same_every_time() -> None:
    assert spent_by("llama3-8b", "nodes=1") == spent_by("llama3-8b", "nodes=1") > 0


def test_a_search_beyond_its_budget_ends_and_one_without_a_budget_does_not() -> None:
    setting = gallery_setting("llama3-8b", "nodes=1")
    with pytest.raises(BudgetSpent), PricingBudget(100).limiting():
        search(setting)
    assert search(setting).safe.any()
    count_candidates(1e15)  # nobody counts


def test_a_search_that_is_cut_short_hands_on_a_safe_layout_that_it_knew() -> None:
    setting = gallery_setting("llama3-8b", "nodes=1")
    needed = spent_by("llama3-8b", "nodes=1")
    with pytest.raises(BudgetSpent) as spent, PricingBudget(needed - 1).limiting():
        search(setting)
    assert spent.value.safe_layout is not None


def test_what_is_searched_for_alone_is_what_the_whole_search_finds() -> None:
    for overrides in (("nodes=1", "cluster=a100-40gb-x8"), ("nodes=1", "memory={limit: 0.02}")):
        setting = gallery_setting("llama3-8b", *overrides)
        alone, usual = search(setting, exact=1, safe_alone=True), search(setting, exact=1)
        assert alone.safe.any() == usual.safe.any()
        assert alone.any_legal == usual.any_legal
        if usual.safe.any():
            assert alone.candidate(setting.recipe, 0) == usual.candidate(setting.recipe, 0)


def test_where_no_part_may_look_at_anything_no_change_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    spend_advice(monkeypatch, "PIN_CANDIDATES", "TECHNIQUE_CANDIDATES", "NODE_CANDIDATES")
    plan = make_plan(gallery_setting("llama3-8b", *TIGHT))
    assert not plan.safe
    assert CUT_SHORT in (plan.advice or "")
    assert plan.changes is None


def test_a_change_that_is_found_after_a_part_ended_at_its_budget_is_not_called_the_smallest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spend_advice(monkeypatch, "PIN_CANDIDATES", "TECHNIQUE_CANDIDATES")
    advice = find_advice(gallery_setting("llama3-8b", *TIGHT))
    assert CUT_SHORT in advice.sentence
    assert advice.change is not None
    assert not advice.change.smallest
    assert "nodes" in advice.change.settings


def spend_advice(monkeypatch: pytest.MonkeyPatch, *parts: str) -> None:
    for part in parts:
        monkeypatch.setattr(smallest_change, part, 10)


def test_hints_neighbours_and_legal_sizes_end_at_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = gallery_setting("llama3-8b", "layout={tensor: 8, recompute: full}")
    plan = make_plan(setting)
    planned = setting.with_recipe(as_planned(setting.recipe, plan.chosen))
    illegal = gallery_setting("quickstart", "training.global_batch_size=7")
    assert hints.faster_choices(setting, plan)
    assert neighbours.neighbours(planned, plan.layout)
    assert "Legal would be" in str(no_layout(illegal))
    monkeypatch.setattr(hints, "HINT_CANDIDATES", 10)
    monkeypatch.setattr(neighbours, "NEIGHBOUR_CANDIDATES", 1)
    monkeypatch.setattr(no_legal_layout, "REMEDY_CANDIDATES", 0.01)
    assert hints.faster_choices(setting, plan) == []
    assert neighbours.neighbours(planned, plan.layout) == []
    assert "Legal would be" not in str(no_layout(illegal))


def test_every_long_part_reports_how_far_it_is() -> None:
    heard: set[str] = set()
    with heard_by(lambda what, done, total: heard.add(what)):
        find_advice(
            gallery_setting(
                "llama3-405b", "nodes=1", "layout={tensor: 8, context: 1, micro_batch_size: 1, techniques: asked}"
            )
        )
    assert {"kinds of changes", "nodes"} <= heard
