"""Arguments that the user passes on to a framework, in three classes: priced by the formula, neutral to GPU memory, and
unknown. Unknown arguments count where they could matter (planner/refusal.py). The class of each
flag is data of its backend (flag_classes.json)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from llmlaunch.frameworks.argument import flag_groups
from llmlaunch.frozen import frozen
from llmlaunch.recipe.types import Recipe

PRICED, NEUTRAL, UNKNOWN = "priced", "neutral", "unknown"
# What an unknown argument may do: make a step add more or less than was priced, or either; make the model states
# smaller as well; or decide the memory by itself.
MORE, LESS, EITHER, LESS_OF_STATES, DECIDES = "more", "less", "either", "less of the model states", "decides"


@frozen
class FlagClass:
    """What is known about a flag. `kind` is PRICED, NEUTRAL or UNKNOWN, `why` is the reason, and `key` names the recipe
    keys with the same meaning, if there are any. `effect` is what an unknown flag may do to the priced memory: MORE,
    LESS, EITHER, LESS_OF_STATES or DECIDES. A flag that may need more memory adds at most `times` what a step adds to
    the model states."""

    kind: str
    why: str
    key: str = ""
    effect: str = EITHER
    times: float = 1.0


OF_THE_SCRIPT = FlagClass("", "an argument of your own script, whose memory is your word")


@frozen
class ClassedArgument:
    """One flag that the user wrote, with its values as written, and its class."""

    flag: str
    values: tuple[str, ...]
    flag_class: FlagClass

    @property
    def text(self) -> str:
        return " ".join((self.flag, *self.values))

    @property
    def sentence(self) -> str:
        """The class and the reason for it, as `llmlaunch explain-args` shows them."""
        kind, key = self.flag_class.kind, self.flag_class.key
        mend = f"; the recipe says it as {key}" if key else ""
        return f"{kind}: {self.flag_class.why}{mend}" if kind else self.flag_class.why


@frozen
class ClassedArguments:
    """All arguments that the user wrote for one job, in order."""

    arguments: tuple[ClassedArgument, ...] = ()

    def of_kind(self, kind: str) -> tuple[ClassedArgument, ...]:
        return tuple(argument for argument in self.arguments if argument.flag_class.kind == kind)

    @property
    def unknown(self) -> tuple[ClassedArgument, ...]:
        return self.of_kind(UNKNOWN)

    @property
    def deciding(self) -> tuple[ClassedArgument, ...]:
        """The unknown arguments that decide memory by themselves, such as another optimizer."""
        return self._with_effect(DECIDES)

    @property
    def costing(self) -> tuple[ClassedArgument, ...]:
        """The unknown arguments that may make a job need more memory than was priced."""
        return self._with_effect(MORE, EITHER)

    @property
    def sparing(self) -> tuple[ClassedArgument, ...]:
        """The unknown arguments that may make a job need less memory than was priced."""
        return self._with_effect(LESS, EITHER, LESS_OF_STATES)

    def _with_effect(self, *effects: str) -> tuple[ClassedArgument, ...]:
        return tuple(argument for argument in self.unknown if argument.flag_class.effect in effects)

    @property
    def of_the_script(self) -> tuple[ClassedArgument, ...]:
        return tuple(argument for argument in self.arguments if argument.flag_class == OF_THE_SCRIPT)

    def as_json(self) -> dict[str, list[str]] | None:
        """Return the arguments by class, or None if the recipe has none."""
        if not self.arguments:
            return None
        return {kind: [argument.text for argument in self.of_kind(kind)] for kind in (PRICED, NEUTRAL, UNKNOWN)}


NO_ARGUMENTS = ClassedArguments()


NO_FLAG = FlagClass(UNKNOWN, "no flag that llmlaunch knows")
BY_WORD = FlagClass(NEUTRAL, "changes no GPU memory by your word (backend.neutral_args)")


@frozen
class FlagGroup:
    """Flags of one class with the same reason. `patterns` maps names as a parser keeps them (`dest`), or patterns of
    names, to the values for which the flag has this class; no values mean any value."""

    title: str
    flag_class: FlagClass
    patterns: Mapping[str, tuple[str, ...]]

    def holds(self, name: str, values: Sequence[str] | None) -> bool:
        """Whether a flag with these values is in this group; with None, whether it is with any value."""
        if values is None:
            return any(not limited and fnmatchcase(name, pattern) for pattern, limited in self.patterns.items())
        return any(
            limited and fnmatchcase(name, pattern) and " ".join(values) in limited
            for pattern, limited in self.patterns.items()
        )


@cache
def flag_table(path: Path, table: str = "groups") -> tuple[FlagGroup, ...]:
    """Return the groups in one table of a file of flag classes."""
    groups = json.loads(path.read_text(encoding="utf-8"))[table]
    return tuple(
        FlagGroup(
            group["title"],
            FlagClass(group["class"], group["why"], group.get("key", ""), group.get("effect", EITHER)),
            dict(_pattern(word) for line in group["flags"] for word in line.split()),
        )
        for group in groups
    )


def with_rows(groups: Iterable[FlagGroup], subjects: Mapping[str, str]) -> tuple[FlagGroup, ...]:
    """Return the groups, extended by flags according to their subjects. `subjects` maps the name of a flag to the title
    of its group."""
    return tuple(
        replace(group, patterns={**group.patterns, **{name: () for name in subjects if subjects[name] == group.title}})
        for group in groups
    )


def _pattern(word: str) -> tuple[str, tuple[str, ...]]:
    pattern, _, values = word.partition("=")
    return pattern, tuple(values.split(",")) if values else ()


def group_of(table: Iterable[FlagGroup], name: str, values: Sequence[str]) -> FlagGroup | None:
    """Return the group of a flag, or None if it is in none. A group that names the flag's value takes precedence over a
    group for all values."""
    groups = tuple(table)
    by_value = (group for group in groups if group.holds(name, values))
    return next(by_value, None) or next((group for group in groups if group.holds(name, None)), None)


def class_arguments(
    recipe: Recipe, class_of: Callable[[str, tuple[str, ...], bool], FlagClass | None]
) -> ClassedArguments:
    """Return `backend.script_args` and `backend.extra_args` with the class of each. `class_of` takes a flag, its
    values, and whether it is one of the script's own; if it returns None, the flag is left out, because rendering
    refuses it anyway."""
    backend = recipe.backend
    classed = []
    for words, of_script in ((backend.script_args, True), (backend.extra_args, False)):
        for flag, values in flags_with_values(words):
            by_word = flag in backend.neutral_args
            flag_class = BY_WORD if by_word else class_of(flag, values, of_script)
            if flag_class is not None:
                classed.append(ClassedArgument(flag, values, flag_class))
    return ClassedArguments(tuple(classed))


def flags_with_values(words: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each flag with its values; `--flag=value` is a flag with one value."""
    for group in flag_groups(words):
        first, *values = map(str, group)
        flag, equals, value = first.partition("=") if first.startswith("--") else (first, "", "")
        yield flag, (*([value] if equals else []), *values)
