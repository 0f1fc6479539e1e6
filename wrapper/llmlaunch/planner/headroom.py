"""A plan keeps head-room: one whose stated risk is above a bound gives way to a roomier layout that is hardly slower.

The rule and its numbers are data, as the habits are: `headroom` in `preference.json`. It comes after the preference.
The ranking chooses a layout; where that one's stated risk is above the bound, the roomier layouts are ranked by the
same keys, and the first of them whose step takes at most `within` longer is planned in its place. How much slower a
layout is depends on step times alone, so that plain parts do not make up for time; which of the roomier ones is taken
depends on both, so that the plan is the one of a lower limit wherever that is near enough.

The rule chooses and forbids nothing: what is safe is still decided by `memory.risk`. It does not apply where no risk is
stated, where no layout is safe, or where `layout: {preference: off}` asks for the fastest layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np

from llmlaunch.calibration.lessons import MeasuredStep, Rehearsal
from llmlaunch.layout import AMOUNTS, LayoutColumns
from llmlaunch.planner.plan import FullerLayout, JobLength, budget_shares
from llmlaunch.planner.points import Points, Reach, join_rows, same_split
from llmlaunch.planner.preference import HeadroomRule, headroom_rule
from llmlaunch.planner.search import EXACT, OUTPACED, LegalLayouts, SearchResult, search
from llmlaunch.planner.setting import Setting


def paced(setting: Setting, result: SearchResult) -> SearchResult:
    """Return the result with all step times corrected by what single runs show. The ranking stays."""
    pace = setting.lessons.shared_factor
    if len(result.first) and not any(step.decides for step in setting.lessons.measured_steps):
        first = int(result.first[0])
        measured = result.measured.get(first)
        pace = pace if measured is None else measured.step_seconds / float(result.step_seconds[first])
    if pace == 1.0:
        return result
    rows = replace(result.points.rows, step_seconds=pace * result.step_seconds)
    points = replace(result.points, rows=rows)
    return replace(result, points=points, preferred_seconds=pace * result.preferred_seconds, pace=pace)


def with_pace_of(setting: Setting, result: SearchResult) -> Setting:
    """Return the setting in which every other layout is timed as those of the result were, so that what is compared
    with its plan is compared alike."""
    lessons = setting.lessons
    if not lessons.measured_steps:
        return setting
    decisive = tuple(step for step in lessons.measured_steps if step.decides)
    return setting.with_lessons(replace(lessons, measured_steps=decisive, shared_factor=result.pace))


Evidence = TypeVar("Evidence", Rehearsal, MeasuredStep)

ROUNDING = 1e-9  # of a budget that is used up to the last second


def search_with_headroom(
    setting: Setting,
    whole: bool = False,
    exact: int = EXACT,
    safe_alone: bool = False,
    legal: LegalLayouts | None = None,
) -> SearchResult:
    """Search as `search` does, with the layout first that the rule of head-room plans, and with what single runs of
    the job show of its step times.

    Raises:
        UserError: the recipe asks for what its backend cannot do whatever the layout.
    """
    return paced(setting, with_headroom(setting, search(setting, whole, exact, safe_alone=safe_alone, legal=legal)))


def with_headroom(setting: Setting, result: SearchResult) -> SearchResult:
    """Return the result of a search in this setting with the roomier layout first, where the rule asks for one and
    there is one; else the result as it is."""
    rule = headroom_rule()
    if not setting.recipe.preference or setting.widened or not np.any(result.safe):
        return result
    first = int(result.first[0])
    risk, roomy_bytes = stated_risk_at(setting, result, first), setting.limit.bytes_at(rule.risk)
    if risk is None or risk <= rule.risk or roomy_bytes is None:
        return result
    most_seconds = _most_seconds(setting, float(result.step_seconds[first]), rule)
    roomy = result.safe & (result.device_bytes <= roomy_bytes) & (result.step_seconds <= most_seconds)
    roomy[list(result.rehearsed)] = False  # they are judged anew
    reach = Reach(most_seconds, float(result.preferred_seconds[roomy].min(initial=np.inf)))
    limit = replace(setting.limit, limit_bytes=roomy_bytes, fits_bytes=None)
    roomier = search(replace(setting, limit=limit), exact=1, reach=reach, legal=result.legal)
    return _with_first(setting, result, roomier) if len(roomier.first) else result


def stated_risk_at(setting: Setting, result: SearchResult, index: int) -> float | None:
    """Return the stated risk of the point at `index`, by its rehearsal where one decides about it; None where no risk
    can be stated."""
    rehearsal = result.rehearsed.get(index)
    return setting.limit.risk_of(int(result.device_bytes[index]) if rehearsal is None else rehearsal.device_bytes)


def fuller_layout(setting: Setting, result: SearchResult) -> FullerLayout | None:
    """Return the layout that gave way to the first one of the ranking for its head-room; None where none did."""
    if result.gave_way is None:
        return None
    gain = float(result.step_seconds[int(result.first[0])] / result.step_seconds[result.gave_way]) - 1.0
    risk = stated_risk_at(setting, result, result.gave_way)
    assert risk is not None
    return FullerLayout(result.at(setting.recipe, result.gave_way), gain, risk)


def _most_seconds(setting: Setting, step_seconds: float, rule: HeadroomRule) -> float:
    """Return how long a step of a roomier layout may take in place of one of `step_seconds`: what the rule grants, but
    no more than the recipe's budget allows."""
    recipe = setting.recipe
    length = JobLength.of(recipe, step_seconds * setting.lessons.shared_factor)
    used = max(budget_shares(recipe.budget, length).values(), default=0.0)
    granted = 1.0 + rule.within
    return step_seconds * (min(granted, (1.0 - ROUNDING) / used) if used else granted)


def _with_first(setting: Setting, result: SearchResult, roomier: SearchResult) -> SearchResult:
    """Return the result with the first layout of the search for roomier ones before all others, as a point of its own
    where it is none yet."""
    found, gave_way = int(roomier.first[0]), int(result.first[0])
    index = next(_same_points(result.points, roomier.points, found), None)
    if index is None:
        index, result = len(result.points), _with_point(setting, result, roomier, found)
    others = result.first[result.first != index]
    return replace(result, first=np.concatenate([[index], others]).astype(others.dtype), gave_way=gave_way)


def _same_points(points: Points, others: Points, index: int) -> Iterator[int]:
    """Yield the points that are the same candidate as one of others, which have the same techniques to choose from."""
    layout, mine, rows = others.layout(index), others.rows, points.rows
    same = same_split(points.splits, layout)[rows.split]
    for name in ("step_techniques", "state_techniques", *AMOUNTS):
        same &= getattr(rows, name) == getattr(mine, name)[index]
    return (row for row in np.flatnonzero(same).tolist() if points.layout(row) == layout)


def _with_point(setting: Setting, result: SearchResult, roomier: SearchResult, found: int) -> SearchResult:
    """Return the result with one more safe point. In a search that left layouts unpriced it is one of those."""
    points, index, one = result.points, len(result.points), np.array([found])
    rows = roomier.points.rows.take(one)
    splits = LayoutColumns.joined([points.splits, roomier.points.splits.take(rows.split)])
    rows = replace(rows, split=np.array([len(points.splits)], dtype=rows.split.dtype))
    refused = dict(result.refused)
    unpriced = refused.get(OUTPACED, 0) > 0
    if unpriced:
        refused[OUTPACED] -= 1
    return replace(
        result,
        points=replace(points, splits=splits, rows=join_rows([points.rows, rows])),
        safe=np.append(result.safe, True),
        preferred_seconds=np.append(result.preferred_seconds, roomier.preferred_seconds[found]),
        searched=result.searched + (not unpriced),
        refused={key: count for key, count in refused.items() if count},
        rehearsed=_moved(result.rehearsed, roomier.rehearsed, found, index),
        measured=_moved(result.measured, roomier.measured, found, index),
    )


def _moved(
    known: Mapping[int, Evidence], other: Mapping[int, Evidence], found: int, index: int
) -> Mapping[int, Evidence]:
    """Return the evidence by point, with that on the point `found` of another search at `index`."""
    return {**known, index: other[found]} if found in other else known
