"""Limits made by hand, with room between safe and unsafe, and rehearsals of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest

from llmlaunch.calibration.support import Rehearsal
from llmlaunch.planner.plan import Limit, Plan
from llmlaunch.planner.setting import Setting
from llmlaunch.units import GIB
from llmlaunch.verdicts import SAFE, TIGHT
from support.plans import plan_of

RECIPE = "llama2-7b-deepspeed"
ONE_LAYOUT = (  # all that is left of the recipe's search
    "layout={techniques: asked, tensor: 1, context: 1, zero_stage: 1, micro_batch_size: 1, recompute: none, "
    "offload_optimizer: 0}"
)


@cache
def needed_gib() -> float:
    """Return the GiB that the one layout needs on two nodes; ask before `judge_by`."""
    return plan_of(RECIPE, ONE_LAYOUT).device_bytes / GIB


@dataclass(frozen=True)
class RiskBySize:
    """Stated risks: each holds up to a number of GiB, ascending; beyond the last, every run dies."""

    steps: tuple[tuple[float, float], ...]

    def risk_of(self, device_bytes: int) -> float | None:
        return next((risk for most_gib, risk in self.steps if device_bytes <= most_gib * GIB), 1.0)


def hand_made_limit(limit_gib: float, fits_gib: float | None, *risks: tuple[float, float]) -> Limit:
    """Return a limit on an 80 GB card; without `risks` none can be stated."""
    return Limit(
        limit_bytes=int(limit_gib * GIB),
        memory_bytes=int(79.1 * GIB),
        memory_source="by hand",
        reason="by 12 measured runs",
        fits_bytes=None if fits_gib is None else int(fits_gib * GIB),
        evidence=RiskBySize(risks) if risks else None,
    )


def judge_by(monkeypatch: pytest.MonkeyPatch, limit: Limit) -> None:
    """Judge every plan of this test by `limit`, whatever its card."""
    monkeypatch.setattr("llmlaunch.planner.setting.memory_limit", lambda *_: limit)


def rehearsal_of(plan: Plan, setting: Setting, device_gib: float) -> Rehearsal:
    """Return what a rehearsal of the plan's layout that held `device_gib` tells."""
    device_bytes = int(device_gib * GIB)
    verdict = plan.limit.verdict_of(device_bytes)
    return Rehearsal(
        workload=setting.recipe.workload,
        layout=plan.layout,
        techniques=plan.chosen.techniques,
        gradient_dtype=plan.chosen.gradient_dtype,
        safe=verdict == SAFE,
        tight=verdict == TIGHT,
        device_bytes=device_bytes,
        limit_bytes=plan.limit.limit_bytes,
        short_bytes=max(device_bytes - plan.estimate.worst.device_bytes, 0),
        sentence=f"rehearsed: {verdict}",
        details={},
    )
