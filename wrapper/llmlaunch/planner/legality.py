"""Which layouts of a search are legal, without evaluating every rule for every layout.

A rule reads few of a layout's fields and few techniques, and these take few values together. Which ones it reads is
observed while it runs; it is then evaluated once for each combination of their values, and the answers are looked up.
A rule is a pure function, so two layouts that agree in all it read get the same answer. The counts are exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from llmlaunch.columns import BoolColumn, IntColumn
from llmlaunch.layout import LayoutColumns, Rule, Situation, refusal_counts
from llmlaunch.planner.search_space import (
    MATTERS,
    SPLIT_FIELDS,
    TechniqueSpace,
    recipe_with_techniques,
    switches_matter,
    technique_values,
)
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import Techniques

__all__ = ["TechniqueLegality", "first_failed", "situation", "technique_legality"]

SPLIT_COLUMNS = frozenset({*SPLIT_FIELDS, "partition"})
FIELD_NAMES = frozenset(f.name for kind in (LayoutColumns, Techniques) for f in fields(kind)) - {"partitions"}
Watched = TypeVar("Watched", LayoutColumns, Techniques)


def situation(recipe: Recipe, layouts: LayoutColumns) -> Situation:
    """Return what the legality rules look at."""
    techniques, numbers = recipe.techniques, recipe.training.numbers
    return Situation(layouts, recipe.model, recipe.workload, recipe.cluster, recipe.nodes, techniques, numbers)


def first_failed(rules: Sequence[Rule], situation: Situation) -> IntColumn:
    """Return the index of the first rule each layout fails, -1 where it passes all: one reason for each refusal."""
    failed = np.full(len(situation.layouts), -1, dtype=np.int64)
    for index, rule in enumerate(rules):
        failed[(failed < 0) & ~rule.allows(situation)] = index
    return failed


@dataclass(frozen=True)
class TechniqueLegality:
    """Whether each split is legal with each combination of techniques, and how many each rule refuses. Most
    combinations share one of a few `masks` over the splits."""

    masks: Sequence[BoolColumn]
    mask_of: IntColumn  # steps x states
    refused: Counter[str]

    def legal(self, step: int, state: int) -> BoolColumn:
        return self.masks[int(self.mask_of[step, state])]


def technique_legality(
    recipe: Recipe, space: TechniqueSpace, splits: LayoutColumns, rules: Sequence[Rule], steps: Sequence[int]
) -> TechniqueLegality:
    """Apply the `rules`, which look at techniques, to all `splits` with the step techniques at `steps` and every set of
    state techniques. What is refused because of switches that nobody asked for is not counted: the split is tried
    without them, and where they change nothing it is the same layout."""
    projections = _Projections(splits)
    observed = [_ObservedRule(rule, projections) for rule in rules]
    masks: list[BoolColumn] = []
    counts: list[Counter[str]] = []
    place: dict[tuple[Any, ...], int] = {}
    mask_of = np.zeros((len(space.step), len(space.state)), dtype=np.int64)
    refused: Counter[str] = Counter()
    for i in steps:
        for j in range(len(space.state)):
            variant = recipe_with_techniques(recipe, space.step[i], space.state[j])
            values = technique_values(space.step[i], space.state[j])
            answers = [rule.answer(variant, values) for rule in observed]
            switches = space.switches[i]
            key = tuple(answer.key for answer in answers), tuple(name for name in switches if name in MATTERS)
            if key not in place:
                place[key] = len(masks)
                failed = _first_failed(len(splits), answers)
                masks.append((failed < 0) & switches_matter(switches, splits))
                counts.append(Counter(refusal_counts(rules, failed)))
            mask_of[i, j] = place[key]
            if not switches:
                refused += counts[place[key]]
    return TechniqueLegality(masks, mask_of, refused)


@dataclass(frozen=True)
class _Answer:
    """Which of the different combinations of values pass a rule, and which of these each split has; `key` is None where
    all pass."""

    passes: BoolColumn
    combination_of: IntColumn

    @cached_property
    def key(self) -> tuple[int, bytes] | None:
        return None if np.all(self.passes) else (id(self.combination_of), self.passes.tobytes())


def _first_failed(count: int, answers: Sequence[_Answer]) -> IntColumn:
    failed = np.full(count, -1, dtype=np.int64)
    for index, answer in enumerate(answers):
        if answer.key is not None:
            failed[(failed < 0) & ~answer.passes[answer.combination_of]] = index
    return failed


class _Projections:
    """The different combinations of values that splits have in some of their fields."""

    def __init__(self, splits: LayoutColumns) -> None:
        self.splits = splits
        self._known: dict[frozenset[str], tuple[LayoutColumns, IntColumn]] = {}

    def of(self, names: frozenset[str]) -> tuple[LayoutColumns, IntColumn]:
        """Return an example of each combination, and the number of each split's."""
        if names not in self._known:
            self._known[names] = self.splits.distinct(sorted(names))
        return self._known[names]


@dataclass
class _ObservedRule:
    """A rule with the names it has read so far, and its answers by the values of the techniques among them."""

    rule: Rule
    projections: _Projections
    columns: frozenset[str] = frozenset()
    techniques: tuple[str, ...] = ()
    answers: dict[tuple[Any, ...], _Answer] = field(default_factory=dict)

    def answer(self, recipe: Recipe, values: Mapping[str, int]) -> _Answer:
        """Return the rule's answer for all splits with the techniques of `recipe` and those `values` of a layout. It is
        asked again when it reads a name for the first time."""
        while True:
            own = tuple(values[n] if n in values else getattr(recipe.techniques, n) for n in self.techniques)
            if own in self.answers:
                return self.answers[own]
            example, combination_of = self.projections.of(self.columns)
            names: set[str] = set()
            watched = _watched(example.with_techniques(**values), names)
            looked_at = replace(situation(recipe, watched), techniques=_watched(recipe.techniques, names))
            passes = np.broadcast_to(self.rule.allows(looked_at), len(example))
            read = frozenset(names)
            if read & SPLIT_COLUMNS <= self.columns and read - SPLIT_COLUMNS <= set(self.techniques):
                self.answers[own] = _Answer(passes, combination_of)
            self.columns |= read & SPLIT_COLUMNS
            self.techniques = tuple(sorted({*self.techniques, *(read - SPLIT_COLUMNS)}))


def _watched(instance: Watched, names: set[str]) -> Watched:
    """Return a copy of a dataclass that adds each field that is read to `names`."""
    kind = type(instance)

    def read(self: Any, name: str) -> Any:
        if name in FIELD_NAMES:
            names.add(name)
        return kind.__getattribute__(self, name)

    watching: Any = type(kind.__name__, (kind,), {"__getattribute__": read})
    copy = object.__new__(watching)
    copy.__dict__.update(vars(instance))
    return copy  # type: ignore[no-any-return]
