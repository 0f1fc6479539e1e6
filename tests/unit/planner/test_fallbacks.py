"""Each fallback has more head-room than the layout before it, and none with as much is faster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llmlaunch.calibration.lessons import NO_LESSONS, Lessons
from llmlaunch.memory.job import Correction
from llmlaunch.planner.fallbacks import HEAD_ROOM_STEP, WORTH, can_load, find_fallbacks
from llmlaunch.planner.plan import Candidate, Fallbacks, Plan
from llmlaunch.planner.plan_json import plan_json
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.search import search
from llmlaunch.planner.setting import Setting
from support.plans import gallery_setting
from support.soak import share

CORRECTED = Lessons(correction=Correction(0.06, 2.0 * 2**30, "measured"))
EACH = [
    ("llama3-8b", NO_LESSONS),
    ("llama2-7b-deepspeed", CORRECTED),
    ("llama2-7b-deepspeed", NO_LESSONS),
    ("llama3-8b", CORRECTED),
]


def fallbacks_of(
    name: str, *overrides: str, count: int = 2, lessons: Lessons = NO_LESSONS
) -> tuple[Setting, Plan, Fallbacks]:
    setting = gallery_setting(name, *overrides, "layout.techniques=asked", "on_oom=fallback", lessons=lessons)
    plan = make_plan(setting)
    return setting, plan, find_fallbacks(setting, plan, count)


@pytest.mark.parametrize(
    ("name", "lessons"),
    share(EACH, EACH[1:2]),
)
def test_each_leaves_a_step_more_free_and_none_with_as_much_is_faster(name: str, lessons: Lessons) -> None:
    setting, plan, fallbacks = fallbacks_of(name, lessons=lessons)
    assert (len(fallbacks.layouts), fallbacks.missing) == (2, None)
    searched = search(setting)
    before = plan
    for fallback in fallbacks.layouts:
        after = fallback.plan
        most = before.chosen.device_bytes - int(HEAD_ROOM_STEP * setting.limit.memory_bytes)
        assert after.safe
        assert after.estimate.worst.device_bytes == after.chosen.device_bytes <= most == after.limit.limit_bytes
        assert after.layout.world_size == plan.layout.world_size
        enough = searched.safe & (searched.device_bytes <= most)
        assert after.chosen.step_seconds <= (1 + WORTH) * np.min(searched.preferred_seconds[enough])
        before = after


def test_pins_are_kept() -> None:
    _, plan, fallbacks = fallbacks_of("llama3-8b", "layout={tensor: 2, micro_batch_size: 1}")
    for candidate in (plan, *(fallback.plan for fallback in fallbacks.layouts)):
        assert (candidate.layout.tensor, candidate.layout.micro_batch_size) == (2, 1)


def test_where_pins_leave_none_it_says_so_and_names_them() -> None:
    split = "layout={tensor: 8, pipeline: 2, context: 1, micro_batch_size: 1, zero_stage: 1, recompute: full}"
    _, plan, fallbacks = fallbacks_of("llama3-8b", split)
    assert fallbacks.layouts == ()
    assert str(fallbacks.missing) == (
        f"on_oom: no layout has 6.3 GiB more head-room than {plan.chosen.describe()}; pinned: tensor: 8, pipeline: 2, "
        "context: 1, micro_batch_size: 1, zero_stage: 1, recompute: full"
    )


def test_fewer_than_asked_for_are_said_to_be_fewer() -> None:
    _, _, fallbacks = fallbacks_of("llama2-7b-deepspeed", count=8)
    assert 0 < len(fallbacks.layouts) < 8
    assert str(fallbacks.missing).startswith(
        f"on_oom: {len(fallbacks.layouts)} of 8 layouts; no other has 6.3 GiB more"
    )


def test_the_plans_json_lists_them_in_order() -> None:
    _, plan, fallbacks = fallbacks_of("llama2-7b-deepspeed")
    assert plan_json(plan)["fallbacks"] is None
    listed = plan_json(replace(plan, fallbacks=fallbacks))["fallbacks"]
    assert [row["device_bytes"] for row in listed] == [f.plan.chosen.device_bytes for f in fallbacks.layouts]
    assert all(isinstance(row["keeps_checkpoints"], bool) for row in listed)


def test_checkpoints_are_kept_only_by_the_same_optimizer() -> None:
    setting, plan, _ = fallbacks_of("llama2-7b-deepspeed", count=0)
    chosen = plan.chosen
    again = replace(chosen, layout=replace(chosen.layout, micro_batch_size=1))

    def loads(other: Candidate) -> bool:
        return can_load(setting.recipe, chosen, other)

    assert loads(again)
    assert not loads(replace(again, gradient_dtype="fp32"))
    assert not loads(replace(again, techniques=replace(again.techniques, offload_optimizer=1.0)))
    assert not loads(replace(again, layout=replace(again.layout, zero_stage=chosen.layout.zero_stage - 1)))
