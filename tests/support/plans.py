"""Settings and plans of the gallery's recipes for tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import product
from types import ModuleType

import numpy as np
import pytest

from llmlaunch.calibration.lessons import NO_LESSONS, Lessons
from llmlaunch.frameworks.framework import backend_for
from llmlaunch.layout import LayoutColumns
from llmlaunch.planner import hints, neighbours, smallest_change
from llmlaunch.planner.legality import first_failed, situation
from llmlaunch.planner.plan import Plan
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.search_space import (
    TechniqueSpace,
    enumerate_splits,
    enumerate_uneven,
    recipe_with_techniques,
    technique_space,
    technique_values,
)
from llmlaunch.planner.setting import Setting, setting_of
from llmlaunch.recipe.types import Recipe
from support.recipes import recipe_of

ADVICE_LIMITS = (
    (hints, "HINT_CANDIDATES"),
    (neighbours, "NEIGHBOUR_CANDIDATES"),
    (smallest_change, "NODE_CANDIDATES"),
    (smallest_change, "PIN_CANDIDATES"),
    (smallest_change, "TECHNIQUE_CANDIDATES"),
)
"""How much of the search space each kind of advice may price."""


def spend(patch: pytest.MonkeyPatch, limits: Iterable[tuple[ModuleType, str]]) -> None:
    """Leave next to nothing of these limits: advice ends with its first look, and the test is about something else."""
    for module, limit in limits:
        patch.setattr(module, limit, 10)


def setting_for(recipe: Recipe, lessons: Lessons = NO_LESSONS) -> Setting:
    """Return the setting of a recipe with the backend it names."""
    return setting_of(recipe, backend_for(recipe), lessons=lessons)


def gallery_setting(name: str, *overrides: str, lessons: Lessons = NO_LESSONS) -> Setting:
    """Return the setting of the gallery's recipe of that name with `KEY=VALUE` overrides."""
    return setting_for(recipe_of(name, *overrides), lessons)


@cache
def plan_of(name: str, *overrides: str) -> Plan:
    """Return the plan of the gallery's recipe of that name with `KEY=VALUE` overrides, made once."""
    return make_plan(gallery_setting(name, *overrides))


def legal_layouts(setting: Setting) -> Iterator[tuple[Recipe, LayoutColumns]]:
    """Yield the layouts of the search space that pass every rule, with a recipe for each set of techniques that has
    any; nothing is priced."""
    recipe, backend = setting.recipe, setting.backend
    space, rules = backend.space(recipe), backend.rules(recipe)
    splits = LayoutColumns.joined([enumerate_splits(recipe, space), enumerate_uneven(recipe, space)])
    for changed, layouts in technique_layouts(technique_space(recipe, backend), splits):
        legal = np.flatnonzero(first_failed(rules, situation(changed, layouts)) < 0)
        if len(legal):
            yield changed, layouts.take(legal)


def apply_techniques(
    space: TechniqueSpace, indices: tuple[int, int], splits: LayoutColumns
) -> tuple[Recipe, LayoutColumns]:
    """Return the recipe and the splits with the step and state techniques at `indices`. A solved amount is set to 1,
    because rules only ask whether there is any."""
    techniques = space.step[indices[0]], space.state[indices[1]]
    return recipe_with_techniques(space.recipe, *techniques), splits.with_techniques(**technique_values(*techniques))


def technique_layouts(space: TechniqueSpace, splits: LayoutColumns) -> Iterator[tuple[Recipe, LayoutColumns]]:
    """Yield `apply_techniques` for every pair of step and state techniques."""
    for indices in product(range(len(space.step)), range(len(space.state))):
        yield apply_techniques(space, indices, splits)


def any_legal(setting: Setting) -> bool:
    """Whether any layout of the search space passes every rule; nothing is priced."""
    return any(legal_layouts(setting))
