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
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from llmlaunch.calibration.evidence import (
    DIED,
    FUJII_SHARE,
    LIVED,
    OWN,
    EvidenceRun,
    JobClass,
    conformal_bound,
    no_bound_sentence,
    runs_needed,
)
from llmlaunch.calibration.lessons import RatioBound, Support, no_support
from llmlaunch.frameworks.framework_version import minor
from llmlaunch.memory.job import Correction
from llmlaunch.rundir.values import counted

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


RESIDENT = ("resident",)  # the kind of peak on a CPU-only machine


@dataclass(frozen=True)
class RunClass:
    """The class of runs that a plan belongs to. `family` is a value of `models.shape.kind_of`, `version` is the
    framework's version, and `kinds` are the kinds of peak on which a margin may be based, best first."""

    accelerator: str
    family: str
    version: str | None
    kinds: tuple[str, ...] = BOUNDING


def support_of(
    scores: Sequence[Score], target: RunClass, calibration_id: str | None = None, risk: float | None = None
) -> Support:
    """Return the support for plans of the class `target`, from the scores on which a margin at `risk` would be
    based."""
    comparable = scores_of_best_kind(scores, 1 if risk is None else runs_needed(risk), target.kinds)
    if not comparable:
        missing = no_support(f"no comparable run on {target.accelerator} was measured")
        return replace(missing, calibration_id=calibration_id)
    lived = [score.score for score in comparable if score.score != DEATH]
    family = sum(score.family == target.family for score in comparable)
    version = sum(same_minor(score.version, target.version) for score in comparable)
    support = Support(
        runs=len(comparable),
        sentence="",
        of_family=family,
        of_version=version,
        died=len(comparable) - len(lived),
        highest=max(lived, default=None),
        calibration_id=calibration_id,
        widened=_novelty(family, version, target),
    )
    return replace(support, sentence=_sentence(support, target))


def _novelty(family: int, version: int, target: RunClass) -> str | None:
    new = [] if family else [f"no run is of a {target.family} model"]
    new += [] if version else [f"no run is of {_version_text(target.version)}"]
    return f"{' and '.join(new)}: nothing is taken off the prediction for the others" if new else None


def _sentence(support: Support, target: RunClass) -> str:
    version = "" if minor(target.version) is None else f", {support.of_version} of {_version_text(target.version)}"
    family = f"{support.of_family} of this family of models ({target.family})"
    runs = f"{counted(support.runs, 'run')} on {target.accelerator}, {family}{version}"
    dead = [f"{support.died} ran out of memory"] if support.died else []
    above = None if support.highest is None else max(support.highest - 1.0, 0.0)
    high = [] if above is None else [f"none peaked more than {100 * above:.1f} % above its prediction"]
    source = "" if support.calibration_id is None else f" (calibration {support.calibration_id})"
    return f"{runs}: {', '.join(dead + high)}{source}"


def mark_outdated(support: Support) -> Support:
    """Return the support given by a calibration that was learned with an earlier version of the formula."""
    reason = "the formula has changed since: nothing is taken off the prediction for them"
    return replace(support, widened=reason if support.widened is None else f"{support.widened}; {reason}")


def trusted_correction(correction: Correction, support: Support) -> Correction:
    """Return the part of a correction that applies to the plan. If the plan is new to the measured runs, only what
    raises a prediction applies."""
    if support.widened is None:
        return correction
    return replace(
        correction,
        torch_share=max(correction.torch_share, 0.0),
        outside_bytes=max(correction.outside_bytes, 0.0),
    )


def ratio_bound(
    scores: Sequence[Score], target: RunClass, risk: float, calibration_id: str | None = None
) -> RatioBound:
    """Return the bound at `risk` for plans of the class `target`: the larger of the bound over all comparable runs and
    the bound over the runs predicted near the limit, where planners choose. The bound is widened if the plan is new to
    the runs."""
    needed = runs_needed(risk)
    comparable = scores_of_best_kind(scores, needed, target.kinds)
    same_version = [score for score in comparable if same_minor(score.version, target.version)]
    runs = same_version if len(same_version) >= needed else comparable
    bound = bound_at(risk, runs)
    if bound.worse is None:
        holder = "the store" if calibration_id is None else f"calibration {calibration_id}"
        died = sum(score.score == DEATH for score in runs)
        return RatioBound(len(runs), None, no_bound_sentence(risk, len(runs), died, holder))
    kind = runs[0].kind
    sentence = f"risk {risk:g} by {len(runs)} comparable runs on {target.accelerator}"
    sentence += "" if calibration_id is None else f" (calibration {calibration_id})"
    wider = _wider_bound(runs, target, risk)
    if wider is not None and wider.ratio is None:
        return RatioBound(len(runs), None, f"{sentence}: {wider.sentence}", wider.sentence)
    ratio = max(bound.worse, 0.0 if wider is None else wider.ratio or 0.0, 1.0 if kind == "reserved" else 0.0)
    sentence += f": a {kind} peak is at most {ratio:.3f} times the prediction{_deciding_runs(bound)}"
    if wider is None:
        return RatioBound(len(runs), ratio, sentence)
    return RatioBound(len(runs), ratio, f"{sentence}; {wider.sentence}", wider.sentence)


def _deciding_runs(bound: Bound) -> str:
    decided_by_all = bound.ratio is None or bound.worse is None or bound.worse <= bound.ratio
    return "" if decided_by_all else f" by the {bound.near_limit_runs} of them that were near the limit"


@dataclass(frozen=True)
class _WiderBound:
    sentence: str
    ratio: float | None  # None: nothing shows how much the new kind may differ


def _wider_bound(runs: Sequence[Score], target: RunClass, risk: float) -> _WiderBound | None:
    """Return the bound if the plan is new to the runs, or None if it is not."""
    groupings: list[dict[Hashable, list[float]]] = []
    new: list[str] = []
    if all(score.family != target.family for score in runs):
        groupings.append(_grouped((score.family, score.score) for score in runs))
        new.append(f"no run is of a {target.family} model")
    same = sum(same_minor(score.version, target.version) for score in runs)
    if same < len(runs):  # there were too few runs of the same version
        groupings.append(_grouped((minor(score.version), score.score) for score in runs))
        new.append(f"{same} are of {_version_text(target.version)}")
    if not new:
        return None
    novelty = " and ".join(new)
    if any(len(groups) < 2 for groups in groupings):
        return _WiderBound(f"{novelty}, and one other kind does not say how far kinds differ", None)
    worst = max(_worst_ratio(scores, risk) for groups in groupings for scores in groups.values())
    if not math.isfinite(worst):
        return _WiderBound(f"{novelty}, and of another kind too many ran out of memory", None)
    return _WiderBound(f"{novelty}: as far off as the worst of the other kinds, and never beyond the rule", worst)


def _grouped(scores: Iterable[tuple[Hashable, float]]) -> dict[Hashable, list[float]]:
    groups: dict[Hashable, list[float]] = {}
    for group, score in scores:
        groups.setdefault(group, []).append(score)
    return groups


def _worst_ratio(scores: Sequence[float], risk: float) -> float:
    """Return the bound of one group by itself, or the group's highest score if it has too few runs for a bound."""
    bound = upper_ratio(scores, risk)
    return max(scores) if bound is None else bound


def same_minor(version: str | None, other: str | None) -> bool:
    """Whether two framework versions have the same major.minor. An unknown version equals every other one."""
    first, second = minor(version), minor(other)
    return first is None or second is None or first == second


def _version_text(version: str | None) -> str:
    number = minor(version)
    return f"version {version}" if number is None else f"version {number[0]}.{number[1]}"
