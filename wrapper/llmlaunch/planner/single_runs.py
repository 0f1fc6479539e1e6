"""What one run of a layout shows of step times: how long all layouts of its job take, and never which one is faster.

The step time of a single run may be that of a slow node, a busy network or a cold cache. Two runs that agree say
something of the layout itself, and their time takes the place of the predicted one (`MeasuredStep.decides`). One run
corrects all layouts alike, by a factor that leaves their order as it was: the whole of its error where its own layout
is planned, so that what is shown is what was measured, and else the part of it that layouts of one job share.
"""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.planner.search import SearchResult
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
