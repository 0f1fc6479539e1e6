"""Limits made by hand, with room between safe and unsafe, and rehearsals of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest

from llmlaunch.calibration.evidence import UNIT_SHARE
from llmlaunch.calibration.lessons import Rehearsal
from llmlaunch.calibration.margins import Margin
from llmlaunch.planner.plan import Plan
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


def bytes_leaving(units: float, fits_bytes: int) -> int:
    """Return the prediction that leaves so many units of shortfall free of `fits_bytes`."""
    return round((fits_bytes - units * GIB) / (1.0 + units * UNIT_SHARE))


@dataclass(frozen=True)
class RiskBySize:
    """Stated risks of a card of `fits_bytes`: each holds up to a number of GiB, ascending; beyond the last, every run
    dies."""

    fits_bytes: int
    steps: tuple[tuple[float, float], ...]

    def risk_of(self, units: float) -> float:
        device_bytes = bytes_leaving(units, self.fits_bytes)
        return next((risk for most_gib, risk in self.steps if device_bytes <= most_gib * GIB), 1.0)


def hand_made_limit(limit_gib: float, fits_gib: float | None, *risks: tuple[float, float]) -> Margin:
    """Return a limit on an 80 GB card; without `risks` none can be stated."""
    fits_bytes = None if fits_gib is None else int(fits_gib * GIB)
    return Margin(
        limit_bytes=int(limit_gib * GIB),
        memory_bytes=int(79.1 * GIB),
        memory_source="by hand",
        reason="by 12 measured runs",
        fits_bytes=fits_bytes,
        evidence=RiskBySize(fits_bytes, risks) if risks else None,
    )


def judge_by(monkeypatch: pytest.MonkeyPatch, limit: Margin) -> None:
    """Judge every plan of this test by `limit`, whatever its card."""
    monkeypatch.setattr("llmlaunch.planner.setting.device_margin", lambda *_: limit)


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
