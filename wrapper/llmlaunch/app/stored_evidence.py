"""What the runs and rehearsals in the store say about a recipe's plans: margin, corrections, support and earlier
peaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from llmlaunch.app.messages import Notify
from llmlaunch.calibration.evidence import EvidenceRun, job_class
from llmlaunch.calibration.lessons import Lessons, Support, no_support, unmeasured_support
from llmlaunch.calibration.margins import DEFAULT_RISK
from llmlaunch.calibration.ratios import (
    BOUNDING,
    RESIDENT,
    RunClass,
    mark_outdated,
    own_runs,
    ratio_bound,
    support_of,
    trusted_correction,
)
from llmlaunch.calibration.records import time_class
from llmlaunch.errors import UserError
from llmlaunch.frameworks.framework import framework_of
from llmlaunch.frameworks.recorded import TABLES
from llmlaunch.memory.job import Correction
from llmlaunch.models.shape import kind_of
from llmlaunch.recipe.types import IN_USE, NO_CALIBRATION, Recipe
from llmlaunch.store.location import Location, existing_store, stored_json

if TYPE_CHECKING:
    from llmlaunch.app.measured_plans import OwnRuns
    from llmlaunch.calibration.calibrations import Calibration
    from llmlaunch.calibration.lessons import RatioBound, Rehearsal
    from llmlaunch.calibration.ratios import Score
    from llmlaunch.planner.setting import Setting
    from llmlaunch.store.history import PastRun
    from llmlaunch.timing.correction import TimeCorrection

T = TypeVar("T")


class DamagedCalibration(UserError):
    """Raised for a calibration in the store that cannot be read."""


def stored_lessons(recipe: Recipe, notify: Notify) -> Lessons:
    """Return the lessons for a recipe from the store. It returns and raises as `evidence.lessons_of` does.

    If the store holds runs of the recipe, those that finished are collected first, once for all that is asked later.
    """
    _collect_own_runs(recipe, notify)
    lessons, times = _lessons_of_memory(recipe, notify), _time_calibration(recipe, notify)
    if times is not None:
        lessons = replace(lessons, time=times.correction, time_error=times.after.mape)
    if recipe.memory.calibration == NO_CALIBRATION:
        return lessons
    from llmlaunch.store.reading import stop_rate

    accelerator = recipe.cluster.accelerator.name
    return _told(lambda store: replace(lessons, stops=stop_rate(store, accelerator)), lessons, notify)


def _told(question: Callable[[Location], T], otherwise: T, notify: Notify) -> T:
    """Return what the store says; `otherwise` if there is none or, with a warning, if it cannot be read."""
    location = existing_store()
    try:
        return otherwise if location is None else question(location)
    except UserError as failure:
        notify(f"warning: measured runs are not used: {failure}")
        return otherwise


def _collect_own_runs(recipe: Recipe, notify: Notify) -> None:
    from llmlaunch.store.reading import has_runs_of

    def collect(location: Location) -> None:
        if has_runs_of(location, recipe.digest, recipe.name):
            from llmlaunch.store.collect import open_collected

            open_collected(notify).close()

    _told(collect, None, notify)


def _time_calibration(recipe: Recipe, notify: Notify) -> Calibration[TimeCorrection] | None:
    """Return the calibration of step times that is in use for the recipe's class of jobs, or None.

    A calibration that was learned with earlier formulas is not used: it would correct errors that no longer exist.
    """
    if recipe.memory.calibration == NO_CALIBRATION:
        return None
    job = job_class(recipe)
    key = time_class(job.backend, job.mixture, recipe.cluster).key
    try:
        calibration = stored_calibration(*key)
    except DamagedCalibration as failure:
        notify(f"warning: step times are not corrected: {failure}")
        return None
    except UserError:  # the lessons of memory have already reported what is wrong with the store
        return None
    if calibration is not None and calibration.outdated:
        notify(
            f"warning: calibration {calibration.id} of step times was made for an earlier version of the formula, and "
            "is not used: `llmlaunch calibrate`"
        )
        return None
    return calibration


def _lessons_of_memory(recipe: Recipe, notify: Notify) -> Lessons:
    """Return what measured runs say about the memory of the recipe's plans.

    Predictions are corrected by the calibration that the recipe names, or by the one in use. Without a calibration,
    nothing is corrected, and all comparable runs in the store bound the risk. If the store cannot be read, there is one
    warning, and the runs shipped with llmlaunch are used.

    Raises:
        UserError: the calibration that the recipe names does not exist, or belongs to another backend or accelerator.
    """
    backend, question, risk = job_class(recipe).backend, _question(recipe), _risk(recipe)
    calibration = _calibration(recipe, backend, notify)
    if calibration is not None:
        support = support_of(calibration.scores, question, calibration.id, risk)
        if calibration.outdated:
            return _lessons_of_outdated(calibration, support, recipe, notify)
        bound = None if risk is None else ratio_bound(calibration.scores, question, risk, calibration.id)
        own_runs = _own_runs(calibration.scores, recipe)
        return Lessons(bound, trusted_correction(calibration.correction, support), support, own_runs)
    measured = _has_runs(backend, notify)
    if risk is None or (recipe.memory.risk is None and not measured):
        if not measured or recipe.memory.calibration == NO_CALIBRATION:
            return Lessons(support=unmeasured_support(recipe))
        unused = f"no calibration is in use for {backend} on {question.accelerator}. To learn one: llmlaunch calibrate"
        return Lessons(support=no_support(unused))
    scores = _scores_in_store(recipe, backend, notify)
    support = support_of(scores, question, risk=risk)
    return Lessons(ratio_bound(scores, question, risk), support=support, own_runs=_own_runs(scores, recipe))


def _risk(recipe: Recipe) -> float | None:
    """Return the risk for which measured runs bound the recipe's plans, or None if they do not."""
    if recipe.memory.risk is not None or recipe.cluster.accelerator.kind == "cpu" or not recipe.memory.by_runs:
        return recipe.memory.risk
    return DEFAULT_RISK


def _has_runs(backend: str, notify: Notify) -> bool:
    from llmlaunch.store.reading import has_measurements

    names = [name for name, table in TABLES.items() if table == backend]
    return _told(lambda store: has_measurements(store, names), False, notify)


def _own_runs(scores: Sequence[Score], recipe: Recipe) -> tuple[EvidenceRun, ...]:
    """Return the runs in the store, by their scores, in the form of the shipped runs."""
    job, card = job_class(recipe), recipe.cluster.accelerator.memory_bytes
    return own_runs([score for score in scores if score.kind in BOUNDING], job, card)


def _lessons_of_outdated(
    calibration: Calibration[Correction], support: Support, recipe: Recipe, notify: Notify
) -> Lessons:
    """Return the lessons for a recipe whose calibration was learned with earlier formulas.

    The scores in such a calibration belong to predictions that are no longer made, so they give no bound. Runs that are
    priced again do: whatever the calibration adds to their predictions only makes the bound safer.
    """
    notify(
        f"warning: calibration {calibration.id} was made for an earlier version of the formula: `llmlaunch calibrate`"
    )
    question, risk = _question(recipe), _risk(recipe)
    bound: RatioBound | None = None
    runs: tuple[EvidenceRun, ...] = ()
    support = mark_outdated(support)
    if risk is not None:
        scores = _scores_in_store(recipe, calibration.backend, notify)
        bound, runs = ratio_bound(scores, question, risk), _own_runs(scores, recipe)
    return Lessons(bound, trusted_correction(calibration.correction, support), support, runs)


def _question(recipe: Recipe) -> RunClass:
    accelerator = recipe.cluster.accelerator
    kinds = RESIDENT if accelerator.kind == "cpu" else BOUNDING
    return RunClass(accelerator.name, kind_of(recipe.model), recipe.backend.runs_version, kinds)


def _calibration(recipe: Recipe, backend: str, notify: Notify) -> Calibration[Correction] | None:
    name, accelerator = recipe.memory.calibration, recipe.cluster.accelerator.name
    if name == NO_CALIBRATION:
        return None
    if name == IN_USE:
        return _told(lambda _: stored_calibration(backend, accelerator), None, notify)
    calibration = stored_calibration(backend, accelerator, name)
    key_path = f"{recipe.path}: memory.calibration: {name}"
    if calibration is None:
        raise UserError(
            f"{key_path}: the store holds no such calibration; `llmlaunch calibrate list` shows all of them"
        )
    if (calibration.backend, calibration.accelerator) != (backend, accelerator):
        raise UserError(
            f"{key_path} is of {calibration.backend} on {calibration.accelerator}; this recipe runs {backend} on "
            f"{accelerator}"
        )
    return calibration


def stored_calibration(backend: str, accelerator: str, calibration_id: str | None = None) -> Calibration[Any] | None:
    """Return the calibration with the given id, or without an id the one in use for `backend` (a value of TABLES) on
    `accelerator`. Return None if there is none.

    Raises:
        UserError: the store cannot be read.
    """
    location = existing_store()
    if location is None:
        return None

    from llmlaunch.store import reading

    try:
        return reading.stored_calibration(location, backend, accelerator, calibration_id)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCalibration(
            f"store {location.shown}: a calibration of {backend} on {accelerator} is damaged: {error}"
        ) from None


def _scores_in_store(recipe: Recipe, backend: str, notify: Notify) -> Sequence[Score]:
    """Price all runs in the store again, and return their scores on the recipe's accelerator."""
    from llmlaunch.calibration.peaks import scores_of_records
    from llmlaunch.cluster.cards import machines
    from llmlaunch.store.collect import open_collected
    from llmlaunch.store.database import open_store
    from llmlaunch.store.measurements import contents
    from llmlaunch.store.reading import has_runs_of

    def records(location: Location) -> list[Any]:
        collected = has_runs_of(location, recipe.digest, recipe.name)
        with open_store(location) if collected else open_collected(notify) as store:
            return [stored_json(text) for text in reversed(contents(store))]

    return scores_of_records(_told(records, [], notify), machines(), backend, recipe.cluster.accelerator.name)


def with_stored_layouts(setting: Setting, notify: Notify) -> Setting:
    """Return the setting as `evidence.with_own_layouts` does, for a recipe that uses a calibration."""
    return _told(lambda store: _with_layouts_of(setting, store), setting, notify)


def _with_layouts_of(setting: Setting, location: Location) -> Setting:
    runs = _own_runs_of(setting, location)
    rehearsals = (*(() if runs is None else runs.rehearsals), *_rehearsed_layouts(setting, location))
    lessons = replace(setting.lessons, rehearsals=rehearsals) if rehearsals else setting.lessons
    if runs is None or not runs.steps:
        return setting if lessons is setting.lessons else replace(setting, lessons=lessons)
    time = replace(lessons.time, job_factor=runs.job_factor)
    return setting.with_lessons(
        replace(lessons, time=time, measured_steps=runs.steps, shared_factor=runs.shared_factor)
    )


def _own_runs_of(setting: Setting, location: Location) -> OwnRuns | None:
    from llmlaunch.store.reading import has_runs_of

    recipe = setting.recipe
    if not has_runs_of(location, recipe.digest, recipe.name):
        return None
    from llmlaunch.app.measured_plans import own_runs_of
    from llmlaunch.store.database import open_store
    from llmlaunch.store.history import measured_attempts

    with open_store(location) as store:
        attempts = measured_attempts(store, recipe.digest, recipe.name)
    return own_runs_of(attempts, setting)


def _rehearsed_layouts(setting: Setting, location: Location) -> tuple[Rehearsal, ...]:
    from llmlaunch.store.reading import rehearsal_texts

    contents = rehearsal_texts(location, framework_of(setting.recipe).recorded_name(setting.recipe))
    if not contents:
        return ()
    from llmlaunch.rehearsal.verdict import rehearsals_of

    return rehearsals_of([stored_json(text) for text in contents], setting)


def stored_peaks(recipe: Recipe, notify: Notify) -> PastRun | None:
    """Return the latest measured run from the store, as `evidence.last_true_peaks` does."""
    from llmlaunch.store.reading import has_runs_of

    def peaks(location: Location) -> PastRun | None:
        if not has_runs_of(location, recipe.digest, recipe.name):
            return None
        from llmlaunch.store import history
        from llmlaunch.store.database import open_store

        with open_store(location) as store:
            return history.last_true_peaks(store, recipe.digest, recipe.name)

    return _told(peaks, None, notify)
