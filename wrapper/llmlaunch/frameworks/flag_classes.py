"""The class of each flag: data of each backend (flag_classes.json), in groups of flags with the same reason. Rows of
the backend's tables of flags join a group by their subject. A flag in no group is unknown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from llmlaunch.frameworks.argument import flag_groups
from llmlaunch.frameworks.classed_arguments import (
    EITHER,
    NEUTRAL,
    UNKNOWN,
    ClassedArgument,
    ClassedArguments,
    FlagClass,
)
from llmlaunch.frozen import frozen
from llmlaunch.recipe.types import Recipe

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
