"""What measured runs say of one recipe's plans: how many stand behind them, what bound they give, what is new to them.

Comparable are runs of the same backend family on the same accelerator; of them those of the same framework major.minor
where both are known, as long as these suffice. A family of models that none of them is of, or a version that too few
are of, is *new*: what was measured is then no sample of what is asked. Each known family (or version) stands for one
that was once new, so the bound is the worst of theirs, each taken alone; where only one is known nothing says how far
another may lie, and there is no bound. Such a bound never allows more than the rule does, and nothing is taken off a
prediction for runs of another kind.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmlaunch.calibration.bounds import bound_at
from llmlaunch.calibration.calibrations import Bound, Score
from llmlaunch.calibration.margins import DIED, Margin, no_margin, runs_needed, upper_ratio
from llmlaunch.memory.correction import Correction
from llmlaunch.rundir.messages import counted

__all__ = [
    "BOUNDING",
    "RESIDENT",
    "Asked",
    "Support",
    "believed",
    "margin_of",
    "nothing_measured",
    "outdated",
    "support_of",
]

BOUNDING = ("device", "reserved")  # kinds of peak a plan's margin may rest on, best first
RESIDENT = ("resident",)  # on a CPU-only machine


@dataclass(frozen=True)
class Asked:
    """What the plan is of. `family` is a word of `models.families.kind_of`, `version` the framework's."""

    accelerator: str
    family: str
    version: str | None
    kinds: tuple[str, ...] = BOUNDING


@dataclass(frozen=True)
class Support:
    """The measured runs behind a plan: all comparable ones, those of its family of models, and those of its framework
    major.minor (unknown versions count, as they do for the bound); None where nobody counted. `highest` is the most
    that one of those that lived exceeded its prediction by, as a ratio. `widened` says what is new to them."""

    runs: int
    sentence: str
    of_family: int | None = None
    of_version: int | None = None
    died: int = 0
    highest: float | None = None
    calibration_id: str | None = None
    widened: str | None = None

    def as_json(self) -> dict[str, Any]:
        """`memory.evidence` of a plan."""
        return {
            "runs": self.runs,
            "of_family": self.of_family,
            "of_version": self.of_version,
            "calibration": self.calibration_id,
            "widened": self.widened,
        }


def support_of(
    scores: Sequence[Score], asked: Asked, calibration_id: str | None = None, risk: float | None = None
) -> Support:
    """Counted in the pool of scores a margin at `risk` would rest on."""
    pool = _pool(scores, asked, 1 if risk is None else runs_needed(risk))
    if not pool:
        return replace(nothing_measured(asked), calibration_id=calibration_id)
    lived = [one.score for one in pool if one.score != DIED]
    family = sum(one.family == asked.family for one in pool)
    version = sum(same_minor(one.version, asked.version) for one in pool)
    support = Support(
        runs=len(pool),
        sentence="",
        of_family=family,
        of_version=version,
        died=len(pool) - len(lived),
        highest=max(lived, default=None),
        calibration_id=calibration_id,
        widened=_new(family, version, asked),
    )
    return replace(support, sentence=_sentence(support, asked))


def nothing_measured(asked: Asked, said: str = "") -> Support:
    """No comparable run: on a new accelerator, or where no calibration is in use."""
    new = said or f"no comparable run on {asked.accelerator} was measured"
    return Support(0, f"none stands behind this: {new}", of_family=0, of_version=0, widened=new)


def margin_of(scores: Sequence[Score], asked: Asked, risk: float, calibration_id: str | None = None) -> Margin:
    """The bound at `risk`: the larger of that over all comparable runs and that over those predicted near the limit,
    where planners choose (`bounds`); widened where what is asked is new to them."""
    needed = runs_needed(risk)
    pool = _pool(scores, asked, needed)
    same = [one for one in pool if same_minor(one.version, asked.version)]
    runs = same if len(same) >= needed else pool
    found = bound_at(risk, [(one.score, one.share) for one in runs])
    if found.worse is None:
        holder = "the store" if calibration_id is None else f"calibration {calibration_id}"
        return no_margin(risk, len(runs), sum(one.score == DIED for one in runs), holder)
    kind = runs[0].kind
    said = f"risk {risk:g} by {len(runs)} comparable runs on {asked.accelerator}"
    said += "" if calibration_id is None else f" (calibration {calibration_id})"
    wider = _wider(runs, asked, risk)
    if wider is not None and wider.ratio is None:
        return Margin(risk, len(runs), needed, None, f"{said}: {wider.sentence}", wider.sentence)
    ratio = max(found.worse, 0.0 if wider is None else wider.ratio or 0.0, 1.0 if kind == "reserved" else 0.0)
    said += f": a {kind} peak is at most {ratio:.3f} times the prediction{_decided(found)}"
    if wider is None:
        return Margin(risk, len(runs), needed, ratio, said)
    return Margin(risk, len(runs), needed, ratio, f"{said}; {wider.sentence}", wider.sentence)


def believed(correction: Correction, support: Support) -> Correction:
    """What of a correction holds for the plan: of runs of another kind only what adds to a prediction."""
    if support.widened is None:
        return correction
    return replace(
        correction,
        torch_share=max(correction.torch_share, 0.0),
        outside_bytes=max(correction.outside_bytes, 0.0),
    )


def outdated(support: Support) -> Support:
    """Of a calibration that was made for an earlier version of the formula."""
    said = "the formula has changed since: nothing is taken off the prediction for them"
    return replace(support, widened=said if support.widened is None else f"{support.widened}; {said}")


def same_minor(one: str | None, other: str | None) -> bool:
    """Framework versions agree in major.minor, or one of them does not say."""
    first, second = minor(one), minor(other)
    return first is None or second is None or first == second


def minor(version: str | None) -> tuple[int, int] | None:
    """(0, 19) of "0.19.2", "v0.19" or "core_v0.19.0"; None of a commit or of words."""
    found = re.fullmatch(r"(?:core_)?v?(\d+)\.(\d+)(?:[.+a-z\d-].*)?", version.strip()) if version else None
    return (int(found[1]), int(found[2])) if found else None


def _pool(scores: Sequence[Score], asked: Asked, needed: int) -> list[Score]:
    """Of one kind of peak: the best that has enough, else the one that has most."""
    by_kind = {kind: [one for one in scores if one.kind == kind] for kind in asked.kinds}
    enough = (pool for pool in by_kind.values() if len(pool) >= needed)
    return next(enough, max(by_kind.values(), key=len))


def _decided(found: Bound) -> str:
    """Which of the two bounds it was."""
    by_all = found.ratio is None or found.worse is None or found.worse <= found.ratio
    return "" if by_all else f" by the {found.near_limit_runs} of them that were near the limit"


@dataclass(frozen=True)
class _Wider:
    sentence: str
    ratio: float | None  # None: nothing says how far what is new may lie


def _wider(runs: Sequence[Score], asked: Asked, risk: float) -> _Wider | None:
    """The bound where something is new to the runs; None where nothing is."""
    ways: list[dict[Hashable, list[float]]] = []
    new: list[str] = []
    if all(one.family != asked.family for one in runs):
        ways.append(_groups((one.family, one.score) for one in runs))
        new.append(f"no run is of a {asked.family} model")
    same = sum(same_minor(one.version, asked.version) for one in runs)
    if same < len(runs):  # those of its version alone did not suffice
        ways.append(_groups((minor(one.version), one.score) for one in runs))
        new.append(f"{same} are of {_said(asked.version)}")
    if not new:
        return None
    said = " and ".join(new)
    if any(len(groups) < 2 for groups in ways):
        return _Wider(f"{said}, and one other kind does not say how far kinds differ", None)
    worst = max(_worst(group, risk) for groups in ways for group in groups.values())
    if not math.isfinite(worst):
        return _Wider(f"{said}, and of another kind too many ran out of memory", None)
    return _Wider(f"{said}: as far off as the worst of the other kinds, and never beyond the rule", worst)


def _groups(scored: Iterable[tuple[Hashable, float]]) -> dict[Hashable, list[float]]:
    groups: dict[Hashable, list[float]] = {}
    for group, score in scored:
        groups.setdefault(group, []).append(score)
    return groups


def _worst(scores: Sequence[float], risk: float) -> float:
    """The bound of one kind alone, its highest score where it has too few runs for one."""
    bound = upper_ratio(scores, risk)
    return max(scores) if bound is None else bound


def _new(family: int, version: int, asked: Asked) -> str | None:
    new = [] if family else [f"no run is of a {asked.family} model"]
    new += [] if version else [f"no run is of {_said(asked.version)}"]
    return f"{' and '.join(new)}: nothing is taken off the prediction for the others" if new else None


def _sentence(found: Support, asked: Asked) -> str:
    version = "" if minor(asked.version) is None else f", {found.of_version} of {_said(asked.version)}"
    family = f"{found.of_family} of this family of models ({asked.family})"
    runs = f"{counted(found.runs, 'run')} on {asked.accelerator}, {family}{version}"
    dead = [f"{found.died} ran out of memory"] if found.died else []
    above = None if found.highest is None else max(found.highest - 1.0, 0.0)
    high = [] if above is None else [f"none peaked more than {100 * above:.1f} % above its prediction"]
    by = "" if found.calibration_id is None else f" (calibration {found.calibration_id})"
    return f"{runs}: {', '.join(dead + high)}{by}"


def _said(version: str | None) -> str:
    found = minor(version)
    return f"version {version}" if found is None else f"version {found[0]}.{found[1]}"
