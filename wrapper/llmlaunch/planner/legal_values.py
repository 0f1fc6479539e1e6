"""Which layouts of a recipe's space the rules allow, without a price for any of them: a contradiction of pins is one of
legality, and a million layouts have few different combinations of pinned values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from llmlaunch.columns import BoolColumn, IntColumn
from llmlaunch.frozen import frozen
from llmlaunch.layout import TECHNIQUE_FIELDS, LayoutColumns, Rule
from llmlaunch.planner.judge import rules_failed
from llmlaunch.planner.legality import first_failed, situation, technique_failures, technique_legality
from llmlaunch.planner.search_space import (
    TechniqueSpace,
    as_ints,
    enumerate_splits,
    enumerate_uneven,
    technique_space,
    technique_values,
)
from llmlaunch.planner.setting import Setting
from llmlaunch.planner.stage_search import have_cuts

__all__ = ["LegalValues", "any_legal", "legal_values", "rule_failures", "size_failures"]


@frozen
class LegalValues:
    """The different combinations of values (rows) that the fields `names` (columns) have in legal layouts, and the
    values that a recipe pins each field to."""

    names: tuple[str, ...]
    pinned: tuple[tuple[int, ...], ...]
    values: IntColumn

    def conflict(self) -> tuple[str, ...] | None:
        """Return the smallest set of pins that no legal layout keeps together; None where all can be kept, and an empty
        set where no layout is legal whatever the pins."""
        kept = self._kept()
        for size in range(len(self.names) + 1):
            for some in combinations(range(len(self.names)), size):
                if not np.any(kept[:, some].all(axis=1)):
                    return tuple(self.names[j] for j in some)
        return None

    def beside_the_others(self, name: str) -> list[int]:
        """Return the values of `name` in legal layouts that keep all other pins."""
        index = self.names.index(name)
        others = [j for j in range(len(self.names)) if j != index]
        return sorted(set(self.values[self._kept()[:, others].all(axis=1), index].tolist()))

    def _kept(self) -> BoolColumn:
        """Return whether each combination keeps each pin (combinations x pins)."""
        kept: BoolColumn = np.ones(self.values.shape, dtype=np.bool_)
        for j, pin in enumerate(self.pinned):
            kept[:, j] = np.isin(self.values[:, j], pin)
        return kept


def legal_values(setting: Setting, relaxed: Setting) -> LegalValues:
    """Return the values that the pinned fields of `setting` have in the legal layouts of `relaxed`, which is its recipe
    with those fields free."""
    names = tuple(setting.recipe.pins)
    of_split = [name for name in names if name not in TECHNIQUE_FIELDS]
    different: set[tuple[int, ...]] = set()
    for splits, space in _offers(relaxed):
        few, row_of = splits.distinct(of_split)
        for legal, techniques in _legal_masks(relaxed, splits, space):
            for row in np.unique(row_of[legal]).tolist():
                different.add(
                    tuple(
                        techniques[name] if name in TECHNIQUE_FIELDS else int(getattr(few, name)[row]) for name in names
                    )
                )
    values = np.array(sorted(different), dtype=np.int64).reshape(len(different), len(names))
    return LegalValues(names, tuple(as_ints(name, setting.recipe.pins[name]) for name in names), values)


def any_legal(setting: Setting) -> bool:
    """Return whether any layout of the setting's space is legal."""
    return any(
        bool(legal.any()) for splits, space in _offers(setting) for legal, _ in _legal_masks(setting, splits, space)
    )


def rule_failures(setting: Setting, rules: Sequence[Rule]) -> Iterator[tuple[LayoutColumns, int, BoolColumn]]:
    """Yield splits with which rule (row) refuses which of them (column), and for how many combinations of techniques
    that is so."""
    of_techniques = np.array([rule.of_techniques for rule in rules])
    asked = [rule for rule in rules if rule.of_techniques]
    for splits, space in _offers(setting):
        failed = rules_failed(setting.recipe, splits, rules)
        for times, failed[of_techniques] in technique_failures(setting.recipe, space, splits, asked):
            yield splits, times, failed


def size_failures(setting: Setting, rules: Sequence[Rule]) -> Iterator[BoolColumn]:
    """Yield which of the rules, which look at sizes alone, refuse which splits (rules x splits)."""
    for splits, _ in _offers(setting):
        yield rules_failed(setting.recipe, splits, rules)


def _offers(setting: Setting) -> Iterator[tuple[LayoutColumns, TechniqueSpace]]:
    """Yield the splits of a search with the techniques that are tried with them: those of even stages, then those of
    uneven ones that the search knows a cut of (`uneven_search`), with which no amount is solved."""
    recipe, space = setting.recipe, setting.backend.space(setting.recipe)
    techniques = technique_space(recipe, setting.backend)
    even = enumerate_splits(recipe, space)
    if len(even):
        yield even, techniques
    uneven = enumerate_uneven(recipe, space)
    uneven = uneven.take(have_cuts(setting.job, uneven)) if len(uneven) else uneven
    steps = tuple(techniques.step[index] for index in techniques.step_without_amounts)
    if len(uneven) and steps:
        yield uneven, replace(techniques, step=steps)


def _legal_masks(
    setting: Setting, splits: LayoutColumns, space: TechniqueSpace
) -> Iterator[tuple[BoolColumn, dict[str, int]]]:
    """Yield which of the splits are legal, once for each different answer, with the fields of a layout that techniques
    set."""
    recipe, rules = setting.recipe, setting.backend.rules(setting.recipe)
    failed = first_failed([rule for rule in rules if not rule.of_techniques], situation(recipe, splits))
    passed = np.flatnonzero(failed < 0)
    if not len(passed):
        return
    asked = [rule for rule in rules if rule.of_techniques]
    legality = technique_legality(recipe, space, splits.take(passed), asked, range(len(space.step)))
    different: set[tuple[int, ...]] = set()
    for i, j in np.ndindex(legality.mask_of.shape):
        techniques = technique_values(space.step[i], space.state[j])
        key = int(legality.mask_of[i, j]), *techniques.values()
        if key not in different:
            different.add(key)
            legal = np.zeros(len(splits), dtype=np.bool_)
            legal[passed] = legality.masks[key[0]]
            yield legal, techniques
