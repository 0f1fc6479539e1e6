"""A margin covers what a planner would choose, too."""

from __future__ import annotations

import random
from collections.abc import Sequence

from llmlaunch.calibration import margins
from llmlaunch.calibration.margins import DIED, Bound, Score


def bound_at(risk: float, runs: Sequence[tuple[float, float | None]]) -> Bound:
    return margins.bound_at(risk, [Score(ratio, "device", "dense gated", None, share) for ratio, share in runs])


def test_the_worse_bound_counts_where_enough_runs_are_near_the_limit() -> None:
    far = [(1.0, 0.1)] * 30
    near = [(1.1, 0.9)] * 9
    bound = bound_at(0.1, [*far, *near])
    assert (bound.runs, bound.near_limit_runs) == (39, 9)
    assert (bound.ratio, bound.near_limit_ratio, bound.worse) == (1.1, 1.1, 1.1)
    diluted = bound_at(0.1, [*far * 10, *near])
    assert (diluted.ratio, diluted.worse) == (1.0, 1.1)
    few = bound_at(0.1, [*far * 10, *near[:8], (1.1, None)])
    assert (few.near_limit_runs, few.near_limit_ratio, few.worse) == (8, None, 1.0)


def test_deaths_near_the_limit_leave_no_bound() -> None:
    bound = bound_at(0.1, [*[(1.0, 0.2)] * 100, *[(1.0, 0.9)] * 9, (DIED, 0.9), (DIED, 0.95)])
    assert bound.ratio == 1.0
    assert bound.near_limit_ratio is None
    assert bound.worse is None


def choice(rng: random.Random) -> tuple[float, float]:
    """A planner's pick of 30 layouts, whose true needs it cannot see: the fullest that fits; score and share."""
    layouts = []
    for _ in range(30):
        need = rng.uniform(0.2, 1.6)
        layouts.append((need, need / rng.lognormvariate(0.0, 0.1)))
    need, predicted = max(((n, p) for n, p in layouts if p <= 1.0), key=lambda layout: layout[0])  # the fastest
    return need / predicted, predicted


def test_a_planners_choices_are_covered_by_the_worse_bound_and_not_by_that_of_all_runs() -> None:
    rng = random.Random(7)
    risk, held_by_all, held_by_worse, trials = 0.1, 0, 0, 400
    for _ in range(trials):
        any_layouts = [(rng.lognormvariate(0.0, 0.1), rng.uniform(0.0, 0.45)) for _ in range(60)]
        bound = bound_at(risk, [*any_layouts, *(choice(rng) for _ in range(20))])
        score = choice(rng)[0]
        held_by_all += bound.ratio is not None and score <= bound.ratio
        held_by_worse += bound.worse is not None and score <= bound.worse
    spread = 3 * (risk * (1 - risk) / trials) ** 0.5
    assert held_by_worse / trials >= 1 - risk - spread
    assert held_by_all / trials < 1 - risk - spread
