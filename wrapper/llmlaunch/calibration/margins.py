"""How far above its prediction a run may peak: a one-sided split-conformal bound from measured runs.

The score of a run is measured / predicted. Of n comparable runs the k-th smallest score, k = ceil((n + 1)(1 - risk)),
is not exceeded by the next run with probability at least 1 - risk, whatever the scores' distribution, as long as the
next run is exchangeable with them (Vovk et al. 2005; Lei et al. 2018, "Distribution-Free Predictive Inference for
Regression", section 2). k <= n needs n >= 1/risk - 1; with fewer runs no finite bound holds and none is given.

A run that died of memory has no measured peak: it is known only to be above the card, so its score is above
card / predicted (censored from below). It counts as +infinity. Whatever its true score is, putting a larger value in
its place can only move the k-th smallest score up, so the bound still covers; a bound at or below the censored value
would have counted it as above anyway, and above that value nothing is known. So a death can raise the bound or make it
infinite (then there is none), and never lowers it. A run known only to have fitted is censored the other way: its
score is below card / predicted, and taking it at that value would be valid but useless, because a small job on a
large card would count as a gross under-prediction. It is left out; leaving out runs that lived makes deaths a larger
share of the rest, which raises the bound.

Bounds are taken over all comparable runs, and over those that a planner would choose. A planner takes, of many layouts,
a fast one that is predicted to just fit. Among layouts near the limit it is likelier to take one whose prediction is
too low than one whose prediction is too high, so its choices exceed their predictions more often than layouts at large
do (the winner's curse), and a bound over all runs covers them less often than it says. Runs predicted near the limit
are mostly what planners chose, so they are exchangeable with the next choice even if the rest are not. The larger of
both bounds covers either way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

FUJII_SHARE = 0.80  # of device memory is safe to use: Fujii et al., arXiv 2411.06465
RISKS = (0.1, 0.05, 0.01)  # at which bounds are reported
NEAR = 0.5  # of the rule's limit: from here on a planner chooses
DIED = math.inf  # the score of a run that ran out of memory
STEP = "step"  # the kind of a score of a step time
BOUNDING = ("device", "reserved")  # kinds of peak a plan's margin may rest on, best first


@dataclass(frozen=True)
class Score:
    """One run: measured / predicted peak of one kind, or step time, or `DIED`. `family` is that of its model, `version`
    that of its framework, `share` the predicted device bytes as a share of the rule's limit (None if its card is not
    known, and of step times)."""

    score: float
    kind: str
    family: str
    version: str | None
    share: float | None


@dataclass(frozen=True)
class Bound:
    """The ratio measured / predicted that a run exceeds at most at `risk`, over all runs and over those predicted near
    the limit. A ratio is None with fewer than `needed` runs, or if too many of them died."""

    risk: float
    needed: int
    runs: int
    ratio: float | None
    near_limit_runs: int
    near_limit_ratio: float | None
    room: float | None = None  # mean of predicted x max(worse, 1) / measured: what a plan sets aside for what it uses

    @property
    def worse(self) -> float | None:
        """The ratio a margin may rest on: the larger one, or that of all runs if too few were near the limit. None also
        if enough were near the limit and too many of those died."""
        if self.near_limit_runs < self.needed or self.ratio is None:
            return self.ratio
        return None if self.near_limit_ratio is None else max(self.ratio, self.near_limit_ratio)


@dataclass(frozen=True)
class Margin:
    """The bound that comparable runs give at a risk. `upper_ratio` is None if they do not suffice.

    `sentence` tells the evidence behind the bound, or why there is none; it ends without a full stop. `widened` tells
    in what way the plan is new to the runs, if it is: such a bound may not allow more than the rule.
    """

    risk: float
    runs: int
    needed: int
    upper_ratio: float | None
    sentence: str
    widened: str | None = None


def runs_needed(risk: float) -> int:
    """Return the fewest runs that can bound `risk`: 1/risk - 1, rounded up."""
    return math.ceil(1 / _exact(risk) - 1)


def upper_ratio(scores: Sequence[float], risk: float) -> float | None:
    """Return the ratio measured / predicted that the next run exceeds with probability at most `risk`.

    Return None with fewer than `runs_needed(risk)` scores, or if so many runs died that the wanted rank is a death.
    """
    place = math.ceil((len(scores) + 1) * (1 - _exact(risk)))
    if place > len(scores):
        return None
    bound = sorted(scores)[max(place, 1) - 1]
    return bound if math.isfinite(bound) else None


def leave_one_out_bounds(scores: Sequence[float], risk: float) -> list[float | None]:
    """Return for each score the `upper_ratio` of all others."""
    place = math.ceil(len(scores) * (1 - _exact(risk)))
    if place > len(scores) - 1:
        return [None] * len(scores)
    order = sorted(range(len(scores)), key=scores.__getitem__)
    at = {index: position for position, index in enumerate(order)}
    ranked = [scores[index] for index in order]
    place = max(place, 1)
    bounds = [ranked[place if at[i] < place else place - 1] for i in range(len(scores))]
    return [bound if math.isfinite(bound) else None for bound in bounds]


def bound_at(risk: float, scores: Sequence[Score]) -> Bound:
    """Return the bound that scores of one kind of peak give."""
    near = [score.score for score in scores if score.share is not None and score.share >= NEAR]
    return Bound(
        risk=risk,
        needed=runs_needed(risk),
        runs=len(scores),
        ratio=upper_ratio([score.score for score in scores], risk),
        near_limit_runs=len(near),
        near_limit_ratio=upper_ratio(near, risk),
    )


def scores_of_best_kind(scores: Sequence[Score], needed: int, kinds: Sequence[str] = BOUNDING) -> list[Score]:
    """Return the scores of the first of `kinds` that has at least `needed`, else of the kind that has most."""
    by_kind = {kind: [score for score in scores if score.kind == kind] for kind in kinds}
    enough = (of_kind for of_kind in by_kind.values() if len(of_kind) >= needed)
    return next(enough, max(by_kind.values(), key=len))


def no_margin(risk: float, runs: int, died: int = 0, holder: str = "the store") -> Margin:
    """Return a margin without a bound, and the reason: too few runs, or too many that died."""
    needed = runs_needed(risk)
    if runs < needed:
        reason = f"risk {risk:g} needs {needed} comparable runs, {holder} holds {runs}"
    else:
        reason = f"risk {risk:g} has no bound: {died} of the {runs} comparable runs in {holder} ran out of memory"
    return Margin(risk, runs, needed, None, reason)


def _exact(risk: float) -> Fraction:
    """The risk as written: in binary, 100 x (1 - 0.01) is not 99."""
    return Fraction(str(risk))
