"""The bound a margin may rest on: over all comparable runs, and over those a planner would choose.

A planner takes, of many layouts, a fast one that is predicted to fit just so. Among layouts near the limit it is
likelier to take one whose prediction is too low than one whose prediction is too high, so what it takes exceeds its
prediction more often than layouts at large do (the winner's curse). A bound over all runs then covers its choices less
often than it says. Runs predicted near the limit are mostly what planners chose, so they are exchangeable with the next
choice where the rest may not be; the larger of both bounds covers either way.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmlaunch.calibration.calibrations import Bound
from llmlaunch.calibration.margins import runs_needed, upper_ratio

__all__ = ["NEAR", "bound_at", "is_near"]

NEAR = 0.5  # of the rule's limit: from here on a planner chooses


def bound_at(risk: float, runs: Sequence[tuple[float, float | None]]) -> Bound:
    """`runs` are pairs of score and share of the rule's limit predicted, None where no card is known."""
    near = [score for score, share in runs if is_near(share)]
    return Bound(
        risk=risk,
        needed=runs_needed(risk),
        runs=len(runs),
        ratio=upper_ratio([score for score, _ in runs], risk),
        near_limit_runs=len(near),
        near_limit_ratio=upper_ratio(near, risk),
    )


def is_near(share: float | None) -> bool:
    return share is not None and share >= NEAR
