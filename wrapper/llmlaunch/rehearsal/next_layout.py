"""The layout to take instead of one that a rehearsal refuted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmlaunch.memory.correction import Correction
from llmlaunch.planner.fallbacks import find_fallbacks
from llmlaunch.planner.plan import Plan
from llmlaunch.planner.plan_json import candidates_json
from llmlaunch.planner.planning import plan_of
from llmlaunch.planner.search import search
from llmlaunch.planner.setting import Setting
from llmlaunch.rehearsal.verdict import Judgement, RankJudgement

__all__ = ["NextLayout", "next_layout"]


@dataclass(frozen=True)
class NextLayout:
    """`why` says how it was priced."""

    plan: Plan
    why: str

    def as_json(self) -> dict[str, Any]:
        return {**candidates_json([self.plan.chosen])[0], "why": self.why}


def next_layout(setting: Setting, plan: Plan, judgement: Judgement) -> NextLayout | None:
    """Return the layout to take instead of a refuted one, with the recipe's pins kept.

    Where a rank ran out of memory, nobody knows by how much it was short: the first layout with a step more head-room.
    Else the fastest that is safe with torch's memory priced as much higher as the worst rank was rehearsed. None where
    the plan is safe, or there is no such layout.
    """
    if judgement.safe:
        return None
    if judgement.worst.ran_out:
        after = find_fallbacks(setting, plan, 1).layouts
        return NextLayout(after[0].plan, "with a step more head-room than the one that ran out") if after else None
    share = _beyond(judgement.worst)
    if share <= 0:
        return None
    priced = _corrected(setting, share)
    searched = search(priced)
    if not np.any(searched.safe):
        return None
    return NextLayout(plan_of(priced, searched, 0), f"with torch's memory priced {share:.1%} higher, as rehearsed")


def _beyond(rank: RankJudgement) -> float:
    """How much more torch's allocator held than predicted, as a share of it."""
    predicted = rank.predicted
    outside = predicted.device_bytes - predicted.reserved_bytes
    return (rank.device_bytes - outside) / predicted.reserved_bytes - 1.0


def _corrected(setting: Setting, share: float) -> Setting:
    """On top of what measured runs add to every prediction."""
    before = setting.lessons.correction
    factor = before.torch_factor * (1.0 + share)
    correction: Correction = replace(before, torch_share=factor - 1.0)
    return replace(setting, lessons=replace(setting.lessons, correction=correction)).with_recipe(setting.recipe)
