"""Runs in the store as evidence: the ratio measured / predicted that the next run exceeds with a stated risk.

A ratio is the score of a run (`Score`), corrected by what a calibration learned. `evidence.conformal_bound` bounds it.

- A run that ran out of memory has no measured peak; it is only known to need more than the card has. It counts as
  infinity, so it can raise the bound or rule one out, but never lower it.
- A run that is only known to have fitted is left out: a small job on a large card would look like a gross
  under-prediction.
- One bound is taken over all comparable runs, and one over the runs that a planner would choose. Near the limit, a
  planner tends to choose layouts whose prediction is too low (the winner's curse). A bound over all runs therefore
  covers a planner's choices less often than it claims. Runs predicted near the limit are mostly runs that planners
  chose. The larger of the two bounds covers both cases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmlaunch.calibration.evidence import (
    DIED,
    FUJII_SHARE,
    LIVED,
    OWN,
    EvidenceRun,
    JobClass,
    conformal_bound,
    runs_needed,
)

RISKS = (0.1, 0.05, 0.01)  # at which bounds are reported
NEAR = 0.5  # of the rule's limit: from here on a planner chooses
DEATH = math.inf  # the ratio of a run that ran out of memory
STEP = "step"  # the kind of a score of a step time
BOUNDING = ("device", "reserved")  # kinds of peak a plan's margin may rest on, best first


@dataclass(frozen=True)
class Score:
    """The score of one run: measured / predicted peak of one kind, or step time, or `DEATH`. `family` is the family of
    its model, `version` the version of its framework, and `share` the predicted device bytes as a share of the rule's
    limit. `share` is None for step times and if the card is unknown."""

    score: float
    kind: str
    family: str
    version: str | None
    share: float | None


@dataclass(frozen=True)
class Bound:
    """The ratio measured / predicted that a run exceeds with a probability of at most `risk`, over all runs and over
    the runs predicted near the limit. A ratio is None with fewer than `needed` runs, or if too many of them ran out of
    memory."""

    risk: float
    needed: int
    runs: int
    ratio: float | None
    near_limit_runs: int
    near_limit_ratio: float | None
    room: float | None = None  # mean of predicted x max(worse, 1) / measured: what a plan sets aside for what it uses

    @property
    def worse(self) -> float | None:
        """The ratio on which a margin may be based: the larger one, or the one over all runs if too few were near the
        limit. It is also None if enough runs were near the limit but too many of them ran out of memory."""
        if self.near_limit_runs < self.needed or self.ratio is None:
            return self.ratio
        return None if self.near_limit_ratio is None else max(self.ratio, self.near_limit_ratio)


def upper_ratio(scores: Sequence[float], risk: float) -> float | None:
    """Return the ratio measured / predicted that the next run exceeds with a probability of at most `risk`.

    Return None with fewer than `runs_needed(risk)` scores, or if too many of the runs ran out of memory.
    """
    bound = conformal_bound(scores, risk)
    return bound if bound is not None and math.isfinite(bound) else None


def bound_at(risk: float, scores: Sequence[Score]) -> Bound:
    """Return the bound at `risk` from scores of one kind of peak."""
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
    """Return the scores of the first of `kinds` that has at least `needed`, or else of the kind that has the most."""
    by_kind = {kind: [score for score in scores if score.kind == kind] for kind in kinds}
    enough = (of_kind for of_kind in by_kind.values() if len(of_kind) >= needed)
    return next(enough, max(by_kind.values(), key=len))


def own_runs(scores: Sequence[Score], job: JobClass, memory_bytes: int) -> tuple[EvidenceRun, ...]:
    """Return the store's runs of the job's class, on cards of `memory_bytes`, in the form of the shipped runs."""
    runs = []
    for index, score in enumerate(scores):
        predicted = 0 if score.share is None else round(score.share * FUJII_SHARE * memory_bytes)
        if predicted < NEAR * memory_bytes * FUJII_SHARE:
            continue
        died = score.score == DEATH
        needed = memory_bytes - predicted if died else round((score.score - 1.0) * predicted)
        runs.append(EvidenceRun(f"own-{index}", OWN, job, DIED if died else LIVED, predicted, needed))
    return tuple(runs)
