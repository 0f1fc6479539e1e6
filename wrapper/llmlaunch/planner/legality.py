"""Which layouts of a search are legal, without evaluating every rule for every layout.

A rule reads few of a layout's fields and few techniques, and these take few values together. Which ones it reads is
observed while it runs; it is then evaluated once for each combination of their values, and the answers are looked up.
A rule is a pure function, so two layouts that agree in all it read get the same answer. The counts are exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any, TypeVar

import numpy as np

from llmlaunch.columns import BoolColumn, IntColumn
from llmlaunch.frameworks.base import StateTechniques, StepTechniques
from llmlaunch.layout import AMOUNTS, LayoutColumns, Rule, Situation, refusal_counts
from llmlaunch.planner.search_space import (
    DECLARED,
    SPLIT_FIELDS,
    TechniqueSpace,
    all_techniques,
    switches_matter,
    technique_values,
)
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import Techniques

SPLIT_COLUMNS = frozenset({*SPLIT_FIELDS, "partition"})
NEVER_READ = {"partitions", "modules", "module_sets"}  # by rules
FIELD_NAMES = frozenset(f.name for kind in (LayoutColumns, Techniques) for f in fields(kind)) - NEVER_READ
_NAMES_READ = "names read"  # where a watched instance keeps them
Watched = TypeVar("Watched", LayoutColumns, Techniques)


def situation(recipe: Recipe, layouts: LayoutColumns) -> Situation:
    """Return what the legality rules look at."""
    techniques, numbers = recipe.techniques, recipe.training.numbers
    return Situation(layouts, recipe.model, recipe.workload, recipe.cluster, recipe.nodes, techniques, numbers)


def first_failed(rules: Sequence[Rule], situation: Situation) -> IntColumn:
    """Return the index of the first rule each layout fails, -1 where it passes all: one reason for each refusal. Rules
    are asked about the layouts that passed those before them, once these are few."""
    failed = np.full(len(situation.layouts), -1, dtype=np.int64)
    asked, passed = np.arange(len(failed)), np.ones(len(failed), dtype=np.bool_)
    for index, rule in enumerate(rules):
        allowed = rule.allows(situation)
        failed[asked[passed & ~allowed]] = index
        passed = passed & allowed
        if not np.any(passed):
            break
        if 2 * np.count_nonzero(passed) < len(asked):
            asked, situation = asked[passed], replace(situation, layouts=situation.layouts.take(passed))
            passed = np.ones(len(asked), dtype=np.bool_)
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
    space: TechniqueSpace, splits: LayoutColumns, rules: Sequence[Rule], steps: Sequence[int]
) -> TechniqueLegality:
    """Apply the `rules`, which look at techniques, to all `splits` with the step techniques at `steps` and every set of
    state techniques. What is refused because of switches that nobody asked for is not counted: the split is tried
    without them, and where they change nothing it is the same layout."""
    answers, kind_of = _all_answers(space, splits, rules, steps)
    mattering = [tuple(name for name in space.switches[i] if DECLARED[name].matters) for i in steps]
    kind_of = np.vstack([kind_of, np.repeat(_numbered(mattering), len(space.state))])
    _, examples, place = np.unique(kind_of, axis=1, return_index=True, return_inverse=True)
    masks: list[BoolColumn] = []
    counts: list[Counter[str]] = []
    for example in examples.tolist():
        kinds = kind_of[: len(rules), example].tolist()
        failed = _first_failed(len(splits), [of_rule[kind] for of_rule, kind in zip(answers, kinds, strict=True)])
        masks.append((failed < 0) & switches_matter(space.switches[steps[example // len(space.state)]], splits))
        counts.append(Counter(refusal_counts(rules, failed)))
    mask_of = np.zeros((len(space.step), len(space.state)), dtype=np.int64)
    mask_of[list(steps)] = place.reshape(-1, len(space.state))
    plain = [i for i in steps if not space.switches[i]]
    refused: Counter[str] = Counter()
    for mask, times in Counter(mask_of[plain].ravel().tolist()).items():
        refused += Counter({key: times * count for key, count in counts[mask].items()})
    return TechniqueLegality(masks, mask_of, refused)


def technique_failures(
    space: TechniqueSpace, splits: LayoutColumns, rules: Sequence[Rule]
) -> Iterator[tuple[int, BoolColumn]]:
    """Yield which of the `rules` refuses which split (rules x splits), each different answer once, and how many
    combinations of techniques have it."""
    answers, kind_of = _all_answers(space, splits, rules, range(len(space.step)))
    different, times = np.unique(np.vstack([kind_of, 0 * kind_of[:1]]), axis=1, return_counts=True)
    for kinds, count in zip(different[: len(rules)].T.tolist(), times.tolist(), strict=True):
        chosen = [of_rule[kind] for of_rule, kind in zip(answers, kinds, strict=True)]
        yield count, np.array([~answer.passes[answer.combination_of] for answer in chosen])


def _all_answers(
    space: TechniqueSpace, splits: LayoutColumns, rules: Sequence[Rule], steps: Sequence[int]
) -> tuple[list[Sequence[_Answer]], IntColumn]:
    """Return the different answers of each rule, and which of them each combination of techniques has (rules x
    combinations, each of `steps` with every set of state techniques)."""
    projections = _Projections(splits, [space.step[i] for i in steps], space.state)
    answered = [_ObservedRule(rule, projections).answer_all(space, steps) for rule in rules]
    kinds = [kind.ravel() for _, kind in answered]
    return [answers for answers, _ in answered], np.reshape(kinds, (len(rules), len(steps) * len(space.state)))


def _numbered(values: Iterable[Hashable]) -> IntColumn:
    """Return a number for each value, the same for equal ones."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)


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
    """The different combinations of values that splits, and sets of techniques, have in some of their fields."""

    def __init__(
        self, splits: LayoutColumns, steps: Sequence[StepTechniques], states: Sequence[StateTechniques]
    ) -> None:
        self.splits, self._steps, self._states = splits, steps, states
        self._known: dict[frozenset[str], tuple[LayoutColumns, IntColumn]] = {}
        self._numbers: dict[tuple[str, bool], IntColumn] = {}

    def of_techniques(self, names: tuple[str, ...]) -> tuple[IntColumn, IntColumn]:
        """Return the numbers of the combinations of the step and of the state techniques."""
        return self._combinations(names, self._steps), self._combinations(names, self._states)

    def _combinations(
        self, names: Sequence[str], techniques: Sequence[StepTechniques] | Sequence[StateTechniques]
    ) -> IntColumn:
        """Return the number of each one's combination of the values that `technique_values` and `Techniques` take from
        it under those `names`."""
        code = np.zeros(len(techniques), dtype=np.int64)
        read = [name for name in names if hasattr(techniques[0], name)]
        for name in [*read, *(["solved"] if not set(AMOUNTS).isdisjoint(read) else [])]:
            key = name, techniques is self._steps
            if key not in self._numbers:
                self._numbers[key] = _numbered(getattr(each, name) for each in techniques)
            code = _numbered((code * len(techniques) + self._numbers[key]).tolist())
        return code

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

    def answer_all(self, space: TechniqueSpace, steps: Sequence[int]) -> tuple[Sequence[_Answer], IntColumn]:
        """Return the rule's different answers, and which of them each combination of techniques has (steps x states).
        The rule is asked once for each combination of the values that it reads."""
        while True:
            names = self.techniques
            step, state = self.projections.of_techniques(names)
            answers: dict[Any, tuple[int, _Answer]] = {}
            kinds = np.zeros((step.max(initial=-1) + 1, state.max(initial=-1) + 1), dtype=np.int64)
            for a, b in np.ndindex(kinds.shape):
                asked = space.step[steps[int(np.argmax(step == a))]], space.state[int(np.argmax(state == b))]
                answer = self.answer(space.recipe, *asked)
                kinds[a, b] = answers.setdefault(answer.key, (len(answers), answer))[0]
            if self.techniques == names:
                return [answer for _, answer in answers.values()], kinds[step][:, state]

    def answer(self, recipe: Recipe, step: StepTechniques, state: StateTechniques) -> _Answer:
        """Return the rule's answer for all splits of the recipe with these techniques. It is asked again when it reads
        a name for the first time."""
        values, sources = technique_values(step, state), (step, state, recipe.techniques)
        while True:
            techniques = (next(getattr(s, n) for s in sources if hasattr(s, n)) for n in self.techniques)
            own = tuple(values.get(n, value) for n, value in zip(self.techniques, techniques, strict=True))
            if own in self.answers:
                return self.answers[own]
            example, combination_of = self.projections.of(self.columns)
            names: set[str] = set()
            watched = _watched(example.with_techniques(**values), names)
            chosen = _watched(all_techniques(recipe, step, state), names)
            looked_at = replace(situation(recipe, watched), techniques=chosen)
            passes = np.broadcast_to(self.rule.allows(looked_at), len(example))
            read = frozenset(names)
            if read & SPLIT_COLUMNS <= self.columns and read - SPLIT_COLUMNS <= set(self.techniques):
                self.answers[own] = _Answer(passes, combination_of)
            self.columns |= read & SPLIT_COLUMNS
            self.techniques = tuple(sorted({*self.techniques, *(read - SPLIT_COLUMNS)}))


def _watched(instance: Watched, names: set[str]) -> Watched:
    """Return a copy of a dataclass that adds each field that is read to `names`."""
    kind: Any = type(instance)
    copy: Watched = object.__new__(_watching(kind))
    copy.__dict__.update(vars(instance), **{_NAMES_READ: names})
    return copy


@cache
def _watching(kind: Any) -> Any:
    def read(self: Any, name: str) -> Any:
        if name in FIELD_NAMES:
            object.__getattribute__(self, "__dict__")[_NAMES_READ].add(name)
        return kind.__getattribute__(self, name)

    return type(kind.__name__, (kind,), {"__getattribute__": read})
