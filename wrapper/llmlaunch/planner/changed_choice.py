"""Which plan there would be if nothing had been measured on this site, and what measured run changed it."""

from __future__ import annotations

import numpy as np

from llmlaunch.calibration.lessons import Lessons, MeasuredStep, Rehearsal
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.job import NO_CORRECTION
from llmlaunch.planner.headroom import search_with_headroom
from llmlaunch.planner.plan import Candidate, ChangedChoice, Plan, as_planned
from llmlaunch.planner.points import evidence_of
from llmlaunch.planner.search import LegalLayouts
from llmlaunch.planner.setting import Setting
from llmlaunch.planner.tight import search_tight
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir.values import counted
from llmlaunch.timing.step import step_time


def changed_choice(setting: Setting, without: Setting, plan: Plan, legal: LegalLayouts | None) -> ChangedChoice | None:
    """Return the layout that would be planned in the setting `without` any measured run or rehearsal of this site, and
    which of them changed it; None where the plan would be the same. `legal` is that of the search that found the
    plan."""
    recipe = setting.recipe
    result = search_with_headroom(without, exact=1, legal=legal)
    if len(result.points) and not np.any(result.safe):
        without, result = search_tight(without, result) or (without, result)
    if not len(result.first):
        return None
    was = result.candidate(recipe, 0)
    if _choice(was) == _choice(plan.chosen):
        return None
    run_id, because = _cause(setting, without, was, plan.chosen)
    return ChangedChoice(was, because, run_id)


def _choice(candidate: Candidate) -> tuple[object, ...]:
    return candidate.layout, candidate.techniques, candidate.gradient_dtype


def _cause(setting: Setting, without: Setting, was: Candidate, now: Candidate) -> tuple[str | None, str]:
    """Return the run that changed the choice, where it is one, and a clause that says how: what was measured of the
    layout itself before what was learned of others."""
    recipe, lessons = setting.recipe, setting.lessons
    of_was, of_now = _rehearsed(recipe, lessons, was), _rehearsed(recipe, lessons, now)
    if of_was is not None and not of_was.safe:
        return None, of_was.sentence
    for candidate, where in ((was, "in the former"), (now, "in the latter")):
        measured = _decisive(recipe, lessons, candidate)
        if measured is not None:
            return measured.run_id, f"{_timed_words(measured)} {where}{_predicted_words(without, candidate)}"
    if of_now is not None and of_now.safe:
        return None, of_now.sentence
    if not lessons.time.changes_nothing:
        return None, f"{counted(lessons.time.runs, 'run')} on this cluster corrected the step times"
    if lessons.correction != NO_CORRECTION:
        return None, f"calibration {lessons.correction.calibration_id} corrected the memory"
    return None, f"measured runs moved the limit: {setting.limit.reason}"


def _rehearsed(recipe: Recipe, lessons: Lessons, candidate: Candidate) -> Rehearsal | None:
    return evidence_of(lessons.rehearsals, as_planned(recipe, candidate), candidate.layout)


def _decisive(recipe: Recipe, lessons: Lessons, candidate: Candidate) -> MeasuredStep | None:
    steps = (step for step in lessons.measured_steps if step.decides)
    return evidence_of(steps, as_planned(recipe, candidate), candidate.layout)


def _timed_words(measured: MeasuredStep) -> str:
    more = f" and {counted(measured.runs - 1, 'other')}" if measured.runs > 1 else ""
    return f"run {measured.run_id}{more} took {measured.step_seconds:.3g} s a step"


def _predicted_words(without: Setting, candidate: Candidate) -> str:
    predicted = without.with_recipe(as_planned(without.recipe, candidate))
    seconds = step_time(predicted.job, predicted.cluster, LayoutColumns.of([candidate.layout])).total
    return f", {float(seconds[0]):.3g} predicted"
