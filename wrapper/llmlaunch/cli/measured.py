"""What the store's measured runs say of a recipe's plans: the calibration in use, and the margin at its risk."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
from llmlaunch.cli.printed import say, warn_once
from llmlaunch.errors import UserError
from llmlaunch.models.families import kind_of
from llmlaunch.recipe.types import IN_USE, NO_CALIBRATION, Recipe

if TYPE_CHECKING:
    from llmlaunch.calibration.margins import Score

__all__ = ["lessons_of", "stored_calibration"]


def lessons_of(recipe: Recipe) -> Lessons:
    """From the calibration that the recipe names or that is in use. Without one nothing is corrected, and a risk is
    bounded by all comparable runs in the store. A store that cannot be read must not keep anybody from planning: that
    is one warning, and the rule decides.

    Raises:
        UserError: the calibration that the recipe names cannot be had.
    """
    backend, asked, risk = _backend(recipe), _asked(recipe), recipe.memory.risk
    calibration = _calibration(recipe, backend)
    if calibration is not None:
        support = support_of(calibration.scores, asked, calibration.id, risk)
        if calibration.estimator != estimator_digest():
            return _of_earlier_formula(calibration, support, asked, risk)
        margin = None if risk is None else margin_of(calibration.scores, asked, risk, calibration.id)
        return Lessons(margin, trusted_correction(calibration.correction, support), support)
    if risk is None:
        by_choice = recipe.memory.calibration == NO_CALIBRATION
        said = f"no calibration is in use for {backend} on {asked.accelerator}"
        return Lessons(support=no_support(asked, "the recipe takes no calibration" if by_choice else said))
    scores = _scores_in_store(backend, asked.accelerator)
    return Lessons(margin_of(scores, asked, risk), support=support_of(scores, asked, risk=risk))


def _of_earlier_formula(calibration: Calibration, support: Support, asked: RunClass, risk: float | None) -> Lessons:
    """Its scores are of predictions that are not made any more, so they bound none. Runs priced anew do: what is added
    to their predictions only makes the bound safer."""
    warn_once([f"calibration {calibration.id} was made for an earlier version of the formula: `llmlaunch calibrate`"])
    support = mark_outdated(support)
    margin = None if risk is None else margin_of(_scores_in_store(calibration.backend, asked.accelerator), asked, risk)
    return Lessons(margin, trusted_correction(calibration.correction, support), support)


def stored_calibration(backend: str, accelerator: str, named: str | None = None) -> Calibration | None:
    """That of the id `named`, else the one in use for `backend` (a value of TABLES) on `accelerator`; None where there
    is none.

    Raises:
        UserError: the store cannot be read.
    """
    from llmlaunch.store import reading
    from llmlaunch.store.location import store_exists, where

    place = where()
    if not store_exists(place):
        return None
    try:
        return reading.stored_calibration(place, backend, accelerator, named)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"store {place.shown}: a calibration of {backend} on {accelerator} is damaged: {error}"
        ) from None


def _backend(recipe: Recipe) -> str:
    """As calibrations name it."""
    name = recorded_name(recipe)
    return TABLES.get(name, name)


def _asked(recipe: Recipe) -> RunClass:
    accelerator = recipe.cluster.accelerator
    kinds = RESIDENT if accelerator.kind == "cpu" else BOUNDING
    return RunClass(accelerator.name, kind_of(recipe.model), recipe.backend.runs_version, kinds)


def _calibration(recipe: Recipe, backend: str) -> Calibration | None:
    asked, accelerator = recipe.memory.calibration, recipe.cluster.accelerator.name
    if asked == NO_CALIBRATION:
        return None
    if asked == IN_USE:
        try:
            return stored_calibration(backend, accelerator)
        except UserError as failure:
            warn_once([f"measured runs are not used: {failure}"])
            return None
    found = stored_calibration(backend, accelerator, asked)
    where = f"{recipe.path}: memory.calibration: {asked}"
    if found is None:
        raise UserError(f"{where}: the store holds no such calibration; `llmlaunch calibrate list` shows all of them")
    if (found.backend, found.accelerator) != (backend, accelerator):
        raise UserError(
            f"{where} is of {found.backend} on {found.accelerator}; this recipe runs {backend} on {accelerator}"
        )
    return found


def _scores_in_store(backend: str, accelerator: str) -> Sequence[Score]:
    """Of all runs in the store; finished ones are collected first."""
    from llmlaunch.store.location import store_exists

    if not store_exists():
        return []
    from llmlaunch.calibration.learning import scores_of_records
    from llmlaunch.calibration.records import clusters_by_gpu
    from llmlaunch.store.collect import open_collected
    from llmlaunch.store.measurements import contents

    try:
        with open_collected(lambda line: say(line, err=True)) as store:
            texts = contents(store)
    except UserError as failure:
        warn_once([f"measured runs are not used: {failure}"])
        return []
    return scores_of_records((json.loads(text) for text in reversed(texts)), clusters_by_gpu(), backend, accelerator)
