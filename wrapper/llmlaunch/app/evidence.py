"""What the store's measured runs and rehearsals say of a recipe's plans: margin, correction, support."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from llmlaunch.backends.registry import recorded_name
from llmlaunch.calibration.calibrations import Calibration, estimator_digest
from llmlaunch.calibration.margins import BOUNDING
from llmlaunch.calibration.records import TABLES
from llmlaunch.calibration.support import (
    RESIDENT,
    Lessons,
    RunClass,
    Support,
    margin_of,
    mark_outdated,
    no_support,
    support_of,
    trusted_correction,
)
from llmlaunch.errors import UserError
from llmlaunch.models.shape import kind_of
from llmlaunch.recipe.types import IN_USE, NO_CALIBRATION, Recipe

if TYPE_CHECKING:
    from llmlaunch.calibration.margins import Score
    from llmlaunch.planner.setting import Setting

__all__ = ["Notify", "ignore", "lessons_of", "stored_calibration", "with_rehearsals"]

Notify = Callable[[str], None]
"""Called with one line for a person: a warning ("warning: ..."), or what was done on the way."""


def ignore(message: str) -> None:
    """Drop a message."""


def lessons_of(recipe: Recipe, notify: Notify) -> Lessons:
    """Return what measured runs say of the recipe's plans.

    Predictions are corrected by the calibration that the recipe names, or by the one in use. Without a calibration
    nothing is corrected, and a risk is bounded by all comparable runs in the store. A store that cannot be read is one
    warning, and the rule decides.

    Raises:
        UserError: the calibration that the recipe names does not exist, or is of another backend or accelerator.
    """
    backend, question, risk = _table(recipe), _question(recipe), recipe.memory.risk
    calibration = _calibration(recipe, backend, notify)
    if calibration is not None:
        support = support_of(calibration.scores, question, calibration.id, risk)
        if calibration.estimator != estimator_digest():
            return _lessons_of_outdated(calibration, support, question, risk, notify)
        margin = None if risk is None else margin_of(calibration.scores, question, risk, calibration.id)
        return Lessons(margin, trusted_correction(calibration.correction, support), support)
    if risk is None:
        reason = f"no calibration is in use for {backend} on {question.accelerator}"
        if recipe.memory.calibration == NO_CALIBRATION:
            reason = "the recipe takes no calibration"
        return Lessons(support=no_support(question, reason))
    scores = _scores_in_store(backend, question.accelerator, notify)
    return Lessons(margin_of(scores, question, risk), support=support_of(scores, question, risk=risk))


def _lessons_of_outdated(
    calibration: Calibration, support: Support, question: RunClass, risk: float | None, notify: Notify
) -> Lessons:
    """The scores of an outdated calibration are of predictions that are not made any more, so they bound none. Runs
    priced anew do: what is added to their predictions only makes the bound safer."""
    notify(
        f"warning: calibration {calibration.id} was made for an earlier version of the formula: `llmlaunch calibrate`"
    )
    margin = None
    support = mark_outdated(support)
    if risk is not None:
        scores = _scores_in_store(calibration.backend, question.accelerator, notify)
        margin = margin_of(scores, question, risk)
    return Lessons(margin, trusted_correction(calibration.correction, support), support)


def _table(recipe: Recipe) -> str:
    """Return the recipe's backend as calibrations name it."""
    name = recorded_name(recipe)
    return TABLES.get(name, name)


def _question(recipe: Recipe) -> RunClass:
    accelerator = recipe.cluster.accelerator
    kinds = RESIDENT if accelerator.kind == "cpu" else BOUNDING
    return RunClass(accelerator.name, kind_of(recipe.model), recipe.backend.runs_version, kinds)


def _calibration(recipe: Recipe, backend: str, notify: Notify) -> Calibration | None:
    name, accelerator = recipe.memory.calibration, recipe.cluster.accelerator.name
    if name == NO_CALIBRATION:
        return None
    if name == IN_USE:
        try:
            return stored_calibration(backend, accelerator)
        except UserError as failure:
            notify(f"warning: measured runs are not used: {failure}")
            return None
    calibration = stored_calibration(backend, accelerator, name)
    place = f"{recipe.path}: memory.calibration: {name}"
    if calibration is None:
        raise UserError(f"{place}: the store holds no such calibration; `llmlaunch calibrate list` shows all of them")
    if (calibration.backend, calibration.accelerator) != (backend, accelerator):
        raise UserError(
            f"{place} is of {calibration.backend} on {calibration.accelerator}; this recipe runs {backend} on "
            f"{accelerator}"
        )
    return calibration


def stored_calibration(backend: str, accelerator: str, calibration_id: str | None = None) -> Calibration | None:
    """Return the calibration of that id, or the one in use for `backend` (a value of TABLES) on
    `accelerator`, or None.

    Raises:
        UserError: the store cannot be read.
    """
    from llmlaunch.store.location import store_exists, where

    place = where()
    if not store_exists(place):
        return None

    from llmlaunch.store import reading

    try:
        return reading.stored_calibration(place, backend, accelerator, calibration_id)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"store {place.shown}: a calibration of {backend} on {accelerator} is damaged: {error}"
        ) from None


def _scores_in_store(backend: str, accelerator: str, notify: Notify) -> Sequence[Score]:
    """Price all runs in the store anew; finished runs are collected first."""
    from llmlaunch.store.location import store_exists

    if not store_exists():
        return []
    from llmlaunch.calibration.learning import scores_of_records
    from llmlaunch.calibration.records import clusters_by_gpu
    from llmlaunch.store.collect import open_collected
    from llmlaunch.store.measurements import contents

    try:
        with open_collected(notify) as store:
            texts = contents(store)
    except UserError as failure:
        notify(f"warning: measured runs are not used: {failure}")
        return []
    return scores_of_records((json.loads(text) for text in reversed(texts)), clusters_by_gpu(), backend, accelerator)


def with_rehearsals(setting: Setting, notify: Notify) -> Setting:
    """Return the setting with what was rehearsed of the recipe's own layouts; unchanged where the recipe takes no
    calibration. A store that cannot be read is one warning."""
    recipe = setting.recipe
    if recipe.memory.calibration == NO_CALIBRATION:
        return setting
    try:
        contents = _rehearsal_records(recorded_name(recipe))
    except UserError as failure:
        notify(f"warning: rehearsals are not used: {failure}")
        return setting
    if not contents:
        return setting
    from llmlaunch.rehearsal.earlier import rehearsals_of

    rehearsals = rehearsals_of([json.loads(text) for text in contents], setting)
    return replace(setting, lessons=replace(setting.lessons, rehearsals=rehearsals))


def _rehearsal_records(backend: str) -> Sequence[str]:
    from llmlaunch.store.location import store_exists, where
    from llmlaunch.store.reading import rehearsal_texts

    place = where()
    return rehearsal_texts(place, backend) if store_exists(place) else []
