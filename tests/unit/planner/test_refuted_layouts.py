"""What refutes a layout tells of its other techniques: none is safe whose estimate is only a little lower."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llmlaunch.planner.changes import judge_layouts
from llmlaunch.planner.plan import as_planned
from llmlaunch.planner.planning import make_plan, plan_of
from llmlaunch.planner.search import REHEARSED, SearchResult, search
from llmlaunch.planner.setting import Setting
from llmlaunch.units import GIB
from support.plans import gallery_setting
from support.tight import rehearsal_of

PINS = "layout={tensor: 2, context: 1, micro_batch_size: 1, sequence_parallel: true, layers_by_stage: even}"
BEYOND = 10.0  # GiB above the limit that the layout was measured to need


@pytest.fixture(scope="module")
def plain() -> Setting:
    return gallery_setting("llama3-8b", PINS)


@pytest.fixture(scope="module")
def refuted(plain: Setting) -> Setting:
    """The setting in which a rehearsal refuted the layout that is chosen without it."""
    plan = make_plan(plain)
    rehearsal = rehearsal_of(plan, plain, (plan.limit.most_bytes / GIB) + BEYOND)
    return replace(plain, lessons=replace(plain.lessons, rehearsals=(rehearsal,)))


def test_techniques_of_a_refuted_layout_are_safe_only_as_far_below_it_as_it_was_short(
    plain: Setting, refuted: Setting
) -> None:
    (rehearsal,), before, after = refuted.lessons.rehearsals, search(plain, whole=True), search(refuted, whole=True)
    same = np.array([before.points.layout(n) == rehearsal.layout for n in range(len(before.points))])
    assert np.count_nonzero(before.safe & same) > 1
    expected_bytes = before.device_bytes + rehearsal.short_bytes
    assert after.safe.tolist() == (before.safe & (~same | (expected_bytes <= rehearsal.limit_bytes))).tolist()
    assert after.refused[REHEARSED] == np.count_nonzero(before.safe & ~after.safe)


def test_one_that_needs_less_by_more_than_that_is_judged_by_its_estimate(plain: Setting) -> None:
    whole = search(plain, whole=True)
    plan = plan_of(plain, whole, 0)
    same = [n for n in np.flatnonzero(whole.safe).tolist() if whole.points.layout(n) == plan.layout]
    needs = sorted({int(whole.device_bytes[n]) for n in same})
    least, most = needs[0], needs[-1]
    assert least < most
    rehearsal = rehearsal_of(plan, plain, (plan.limit.limit_bytes + 1) / GIB)
    rehearsal = replace(rehearsal, short_bytes=rehearsal.limit_bytes - (least + most) // 2)
    after = search(replace(plain, lessons=replace(plain.lessons, rehearsals=(rehearsal,))), whole=True)
    own = next(n for n in same if whole.at(plain.recipe, n).techniques == rehearsal.techniques)
    for n in same:
        if n != own:
            assert after.safe[n] == (whole.device_bytes[n] <= (least + most) // 2)


def test_the_search_by_bounds_finds_the_same_first_ones(refuted: Setting) -> None:
    def first(result: SearchResult) -> list[str]:
        return [result.candidate(refuted.recipe, place).describe() for place in range(6)]

    assert first(search(refuted)) == first(search(refuted, whole=True))


def test_a_pinned_layout_is_judged_as_the_search_judges_it(refuted: Setting, plain: Setting) -> None:
    (rehearsal,), result = refuted.lessons.rehearsals, search(plain, whole=True)
    others = (result.at(plain.recipe, n) for n in np.flatnonzero(result.safe).tolist())
    other = next(c for c in others if c.layout == rehearsal.layout and c.techniques != rehearsal.techniques)
    setting = refuted.with_recipe(as_planned(refuted.recipe, other))
    (verdict,) = judge_layouts(setting, [other.layout])
    assert verdict.refusal is not None
    assert verdict.refusal.key == REHEARSED
    assert "with other techniques this layout is taken to be off by as much" in verdict.refusal.reason
