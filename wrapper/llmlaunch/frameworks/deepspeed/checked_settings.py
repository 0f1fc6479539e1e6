"""Settings of ds_config.json checked against their rows: the form that DeepSpeed's own configuration types take, what
the recipe decides elsewhere, and which version has a key.

Whoever reads a ds_config has its keys checked here first, and so meets no text where a number should be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmlaunch.errors import UserError
from llmlaunch.frameworks.deepspeed.own_settings import AUTO, set_keys
from llmlaunch.frameworks.deepspeed.setting_row import ABSENT, MAPPING
from llmlaunch.frameworks.deepspeed.settings import FORMS, PLANNED, SETTINGS, settings_of
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir.values import shortened


class WrongSetting(Exception):
    """A key of a ds_config has a value of another form; the message names the dotted key and says how to correct it."""


def checked_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with every section of FORMS a mapping; a section that is null is left out.

    `"zero_optimization": true` is stage 1, as DeepSpeed's earlier form had it (`read_zero_config_deprecated`). Raises
    WrongSetting for the first key that has another form.
    """
    zero = settings.get("zero_optimization")
    current_form = {**settings, "zero_optimization": {"stage": int(zero)}} if isinstance(zero, bool) else settings
    checked = _copied(current_form)
    for key, form in FORMS.items():
        *sections, name = key.split(".")
        within: Any = checked
        for section in sections:
            within = within.get(section, {})
        value = within.get(name)
        if value is None and form is MAPPING:
            within.pop(name, None)
        elif value is not None and not form.fits(value) and (form is MAPPING or value != AUTO):
            raise WrongSetting(f"{key}: must be {form.words}, not {shortened(str(value), 40)!a}; correct it")
    return checked


def refuse_odd_settings(recipe: Recipe) -> None:
    """Raise UserError for a key of `backend.ds_config` that has another form than DeepSpeed takes."""
    try:
        checked_settings(recipe.backend.ds_config)
    except WrongSetting as wrong:
        raise UserError(f"{recipe.path}: backend.ds_config.{wrong}") from None


def refuse_planned_settings(recipe: Recipe) -> None:
    """Raise UserError for a key that the recipe decides elsewhere, for "auto" where nobody would fill it in, and for
    what the job's DeepSpeed does not have."""
    for key, value in set_keys(recipe.backend.ds_config):
        if key in PLANNED:
            raise UserError(
                f"{recipe.path}: backend.ds_config.{key}: follows from {PLANNED[key]}; write that, and remove it here"
            )
        if value == AUTO and recipe.backend.script_kind != "hugging-face":
            raise UserError(
                f'{recipe.path}: backend.ds_config.{key}: "auto" is filled in by Hugging Face\'s Trainer alone; write '
                "the value"
            )
        _refuse_another_version(recipe, key)
    _refuse_later_formats(recipe)


def _refuse_later_formats(recipe: Recipe) -> None:
    """Raise UserError for formats of optimizer states that a later DeepSpeed than the job's has, where its version
    is known."""
    version = recipe.backend.runs_version
    for row in settings_of("training.optimizer"):
        if version is not None and row.is_after(version) and row.value(recipe, Layout()) is not ABSENT:
            raise UserError(
                f"{recipe.path}: {PLANNED[row.key]}: is rendered with {row.key}, which DeepSpeed {version} does not "
                f"have (it came with {row.since}); remove it, or name another backend.version"
            )


def _refuse_another_version(recipe: Recipe, key: str) -> None:
    """Raise UserError for a key that the job's DeepSpeed does not have, where its version is known. DeepSpeed itself
    would stop at it, or overlook it at the top level."""
    version = recipe.backend.runs_version
    row = next((row for row in SETTINGS if f"{key}.".startswith(f"{row.key}.")), None)
    if version is None or row is None or row.is_in(version):
        return
    change = f"it came with {row.since}" if row.is_after(version) else f"{row.until} removed it"
    raise UserError(
        f"{recipe.path}: backend.ds_config.{key}: DeepSpeed {version} does not have it ({change}); remove it, or name "
        "another backend.version"
    )


def _copied(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copied(value) if isinstance(value, Mapping) else value for name, value in settings.items()}
