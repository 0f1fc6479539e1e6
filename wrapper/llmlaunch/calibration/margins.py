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
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["DIED", "Margin", "left_out", "no_margin", "runs_needed", "upper_ratio"]

DIED = math.inf  # the score of a run that ran out of memory


@dataclass(frozen=True)
class Margin:
    """What comparable runs say at the asked risk. `upper_ratio` is None where they do not suffice.

    `sentence` says what the bound rests on, or why there is none; it ends without a full stop. `widened` says what is
    new to the runs, where something is: such a bound may not allow more than the rule.
    """

    risk: float
    runs: int
    needed: int
    upper_ratio: float | None
    sentence: str
    widened: str | None = None


def runs_needed(risk: float) -> int:
    """The fewest runs that can bound `risk`: 1/risk - 1, rounded up."""
    return math.ceil(1 / _exact(risk) - 1)


def upper_ratio(scores: Sequence[float], risk: float) -> float | None:
    """The ratio measured / predicted that the next run exceeds with probability at most `risk`.

    None with fewer than `runs_needed(risk)` scores, or where deaths reach down to the wanted place.
    """
    place = math.ceil((len(scores) + 1) * (1 - _exact(risk)))
    if place > len(scores):
        return None
    bound = sorted(scores)[max(place, 1) - 1]
    return bound if math.isfinite(bound) else None


def left_out(scores: Sequence[float], risk: float) -> list[float | None]:
    """For every score the bound that the others alone give."""
    place = math.ceil(len(scores) * (1 - _exact(risk)))
    if place > len(scores) - 1:
        return [None] * len(scores)
    order = sorted(range(len(scores)), key=scores.__getitem__)
    at = {index: position for position, index in enumerate(order)}
    ranked = [scores[index] for index in order]
    place = max(place, 1)
    bounds = [ranked[place if at[i] < place else place - 1] for i in range(len(scores))]
    return [bound if math.isfinite(bound) else None for bound in bounds]


def no_margin(risk: float, runs: int, died: int = 0, holder: str = "the store") -> Margin:
    """Too few runs, or too many that died, in one sentence with the numbers."""
    needed = runs_needed(risk)
    if runs < needed:
        said = f"risk {risk:g} needs {needed} comparable runs, {holder} holds {runs}"
    else:
        said = f"risk {risk:g} has no bound: {died} of the {runs} comparable runs in {holder} ran out of memory"
    return Margin(risk, runs, needed, None, said)


def _exact(risk: float) -> Fraction:
    """The risk as written: in binary, 100 x (1 - 0.01) is not 99."""
    return Fraction(str(risk))
