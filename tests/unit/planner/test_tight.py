"""Between safe and unsafe: a plan that fits the card only if its prediction is not too low is tight. It is planned only
where nothing is safe, and runs only where the recipe accepts it, with a layout to fall back on."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlaunch.calibration.margins import Margin
from llmlaunch.errors import NothingSafe
from llmlaunch.planner.fallbacks import HEAD_ROOM_STEP, find_fallbacks
from llmlaunch.planner.plan import Plan
from llmlaunch.planner.planning import make_plan, make_sized_plan
from llmlaunch.planner.refusal import refuse
from llmlaunch.planner.search import search
from llmlaunch.planner.setting import Setting
from llmlaunch.units import GIB
from llmlaunch.verdicts import SAFE, TIGHT, UNSAFE
from support.plans import gallery_setting
from support.tight import ONE_LAYOUT, RECIPE, hand_made_limit, judge_by, needed_gib, rehearsal_of

WORDS = (SAFE, TIGHT, UNSAFE)
NEEDED = needed_gib()
ACCEPT = "memory.accept=tight"


def setting_by(monkeypatch: pytest.MonkeyPatch, limit: Margin, *overrides: str) -> Setting:
    judge_by(monkeypatch, limit)
    return gallery_setting(RECIPE, "layout.techniques=asked", *overrides)


def tight_plan(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> tuple[Setting, Plan]:
    """Return the plan of one layout that needs 2 GiB more than the limit, and its setting."""
    limit = hand_made_limit(NEEDED - 2, NEEDED + 3, (NEEDED + 1, 0.07), (NEEDED + 3, 0.2))
    return make_sized_plan(setting_by(monkeypatch, limit, ONE_LAYOUT, *overrides))


@cache
def least_needed(*overrides: str) -> float:
    """Return the GiB of the layout that needs least."""
    with pytest.MonkeyPatch.context() as patch:
        whole = search(setting_by(patch, hand_made_limit(79.0, None), *overrides), whole=True)
    return float(whole.device_bytes.min()) / GIB


SIZES = st.integers(0, 2**41)


@given(limit_bytes=SIZES, fits_bytes=st.none() | SIZES, smaller=SIZES, larger=SIZES)
def test_a_larger_peak_is_never_judged_better(
    limit_bytes: int, fits_bytes: int | None, smaller: int, larger: int
) -> None:
    limit = Margin(limit_bytes, 2**41, "by hand", "", fits_bytes=fits_bytes)
    smaller, larger = sorted((smaller, larger))
    assert WORDS.index(limit.verdict_of(smaller)) <= WORDS.index(limit.verdict_of(larger))
    assert limit.verdict_of(limit.limit_bytes) == SAFE
    assert limit.verdict_of(limit.most_bytes + 1) == UNSAFE


def test_of_one_layout_the_verdict_falls_with_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = [
        make_plan(setting_by(monkeypatch, hand_made_limit(limit_gib, fits_gib), ONE_LAYOUT)).verdict
        for limit_gib, fits_gib in (
            *((NEEDED + 1, NEEDED + 3), (NEEDED + 1, None)),
            *((NEEDED - 1, NEEDED + 3), (NEEDED - 1, None), (NEEDED - 7, NEEDED - 1)),
        )
    ]
    assert verdicts == [SAFE, SAFE, TIGHT, UNSAFE, UNSAFE]


def test_a_tight_plan_is_refused_with_what_it_risks_and_the_word_that_accepts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, plan = tight_plan(monkeypatch)
    assert plan.verdict == TIGHT
    assert not plan.good
    with pytest.raises(NothingSafe) as refused:
        refuse(plan)
    message = str(refused.value)
    assert refused.value.exit_code == 3
    for part in (
        f"no layout is safe. Tight: {plan.layout.describe()}, pipeline rank 0 needs {NEEDED:.1f} GiB",
        "2.0 GiB more than the limit and 3.0 GiB less than what fits the card",
        "stated risk of running out of memory: 7 %",
        "memory: {accept: tight}",
        "memory.accept=tight",
        "Smallest change that is safe: ",
    ):
        assert part in message
    assert "\n" not in message


def test_what_the_recipe_accepts_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan = tight_plan(monkeypatch, ACCEPT)
    assert (plan.verdict, plan.accepted, plan.good) == (TIGHT, True, True)
    refuse(plan)


def test_accepting_tight_plans_accepts_no_unsafe_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(setting_by(monkeypatch, hand_made_limit(NEEDED - 7, NEEDED - 1), ONE_LAYOUT, ACCEPT))
    with pytest.raises(NothingSafe, match="Closest: TP1"):
        refuse(plan)


@pytest.mark.parametrize("accept", [(), (ACCEPT,)], ids=["refused", "accepted"])
def test_a_safe_layout_goes_before_a_faster_tight_one(monkeypatch: pytest.MonkeyPatch, accept: tuple[str, ...]) -> None:
    limit_gib, fits_gib = 40.0, 79.0
    plan = make_plan(setting_by(monkeypatch, hand_made_limit(limit_gib, fits_gib, (79.0, 0.02)), *accept))
    fastest = make_plan(setting_by(monkeypatch, hand_made_limit(fits_gib, None)))
    assert fastest.chosen.step_seconds < plan.chosen.step_seconds
    assert plan.verdict == SAFE
    assert plan.device_bytes <= limit_gib * GIB < fastest.device_bytes


def test_of_tight_layouts_the_fastest_of_least_risk_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    least_gib = least_needed()
    risks = ((least_gib + 8.0, 0.05), (least_gib + 16.0, 0.055), (79.0, 0.3))
    setting = setting_by(monkeypatch, hand_made_limit(least_gib - 0.1, 79.0, *risks))
    plan = make_plan(setting)
    alike = search(setting_by(monkeypatch, hand_made_limit(least_gib + 16.0, None)))
    assert plan.verdict == TIGHT
    assert plan.device_bytes <= (least_gib + 16.0) * GIB
    assert plan.chosen == alike.candidate(setting.recipe, 0)
    assert plan.limit == setting.limit


def test_where_no_risk_can_be_stated_the_least_memory_stands_in_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    least_gib = least_needed()
    plan = make_plan(setting_by(monkeypatch, hand_made_limit(least_gib - 0.1, 79.0)))
    assert plan.verdict == TIGHT
    assert plan.device_bytes <= (least_gib + 0.8) * GIB


def test_a_search_says_how_many_layouts_are_tight(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(setting_by(monkeypatch, hand_made_limit(30.0, 60.0)))
    assert plan.verdict == SAFE
    assert plan.refused["tight"] > 0
    assert "the 60.0 GiB that fit the card" in plan.refusal_sentences["tight"]


def test_a_tight_count_of_nodes_does_only_where_it_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = hand_made_limit(NEEDED + 2, 79.0, (79.0, 0.1))  # on one node it needs 5 GiB more than on two
    chosen = {}
    for accept in ((), (ACCEPT,)):
        _, plan = make_sized_plan(setting_by(monkeypatch, limit, ONE_LAYOUT, "nodes=auto", *accept))
        assert plan.sizing is not None
        chosen[accept] = (plan.verdict, plan.sizing.nodes)
        if not accept:
            assert [trial.refused for trial in plan.sizing.tried[:-1]][-1:] == ["tight"]
            assert "is tight: needs" in plan.sizing.tried[-2].reason
    assert chosen[()][0] == SAFE
    assert chosen[(ACCEPT,)][0] == TIGHT
    assert (chosen[(ACCEPT,)][1] or 0) < (chosen[()][1] or 0)


def test_a_tight_plan_falls_back_on_a_tight_layout_with_more_head_room(monkeypatch: pytest.MonkeyPatch) -> None:
    least_gib = least_needed()
    limit = hand_made_limit(least_gib - 0.1, 79.0, (79.0, 0.1))
    setting, plan = make_sized_plan(setting_by(monkeypatch, limit, ACCEPT))
    (fallback,) = find_fallbacks(setting, plan, 1).layouts
    assert fallback.plan.verdict == TIGHT
    assert fallback.change is None
    assert fallback.plan.device_bytes <= plan.device_bytes - HEAD_ROOM_STEP * limit.memory_bytes


def test_where_the_pins_leave_none_it_falls_back_on_the_nearest_safe_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    setting, plan = tight_plan(monkeypatch, ACCEPT)
    fallbacks = find_fallbacks(setting, plan, 1)
    (fallback,) = fallbacks.layouts
    assert fallbacks.missing is None
    assert fallback.plan.verdict == SAFE
    assert fallback.plan.device_bytes <= plan.limit.limit_bytes
    assert fallback.plan.layout.world_size == plan.layout.world_size
    assert fallback.change is not None
    assert "layout." in fallback.change


@pytest.mark.parametrize("limit_gib", [NEEDED + 1, NEEDED - 2], ids=["safe by the estimate", "tight by the estimate"])
@pytest.mark.parametrize(("device_gib", "verdict"), [(50.0, SAFE), (NEEDED + 2, TIGHT), (NEEDED + 4, UNSAFE)])
def test_a_rehearsal_decides_between_the_three(
    monkeypatch: pytest.MonkeyPatch, limit_gib: float, device_gib: float, verdict: str
) -> None:
    limit = hand_made_limit(limit_gib, NEEDED + 3, (NEEDED + 1, 0.07), (NEEDED + 3, 0.2))
    setting = setting_by(monkeypatch, limit, ONE_LAYOUT)
    rehearsal = rehearsal_of(make_plan(setting), setting, device_gib)
    lessons = replace(setting.lessons, rehearsals=(rehearsal,))
    plan = make_plan(replace(setting, lessons=lessons))
    assert plan.verdict == verdict
    assert plan.rehearsed == rehearsal
    if verdict == TIGHT:
        with pytest.raises(NothingSafe, match=rf"it was measured to need {device_gib:.1f} GiB.*: 20 %"):
            refuse(plan)


def test_where_nothing_has_more_head_room_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    least_gib = least_needed("nodes=1")
    limit = hand_made_limit(least_gib / 2, least_gib + 1.0)
    setting, plan = make_sized_plan(setting_by(monkeypatch, limit, "nodes=1", ACCEPT))
    assert plan.accepted
    fallbacks = find_fallbacks(setting, plan, 1)
    assert fallbacks.layouts == ()
    assert str(fallbacks.missing).startswith("memory.accept: tight: no layout has")
