"""What a row of a framework's table says of memory: its subject, which gives its class and the reason for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from llmlaunch.frameworks.flag_classes import EITHER, FlagClass, FlagGroup
from llmlaunch.frozen import frozen

__all__ = ["Subject", "flag_groups"]


@frozen
class Subject:
    """A title for the documentation, and the class of the flags that it holds. `kind`, `why`, `key`, `effect` are
    those of a FlagClass. `patterns` names flags, or patterns of flags, that have no row of their own: words of the form
    NAME, or NAME=VALUE,VALUE for some of its values."""

    title: str
    kind: str
    why: str
    key: str = ""
    effect: str = EITHER
    patterns: str = ""


class ClassedRow(Protocol):
    """A row of a table: `key` is its name, `subject` its class, `by_value` the class of some of its values."""

    @property
    def key(self) -> str: ...

    @property
    def subject(self) -> Subject | None: ...

    @property
    def by_value(self) -> tuple[tuple[str, Subject], ...]: ...


def flag_groups(subjects: Sequence[Subject], rows: Iterable[ClassedRow]) -> tuple[FlagGroup, ...]:
    """Return the groups of flags that rows and the patterns of subjects make, in the order of the subjects."""
    patterns: dict[str, dict[str, tuple[str, ...]]] = {subject.title: {} for subject in subjects}
    for row in rows:
        if row.subject is not None:
            patterns[row.subject.title][row.key] = ()
        for value, subject in row.by_value:
            values = patterns[subject.title].get(row.key, ())
            patterns[subject.title][row.key] = (*values, value)
    return tuple(_group(subject, patterns[subject.title]) for subject in subjects)


def _group(subject: Subject, of_rows: Mapping[str, tuple[str, ...]]) -> FlagGroup:
    flag_class = FlagClass(subject.kind, subject.why, subject.key, subject.effect)
    words = (word.partition("=") for word in subject.patterns.split())
    written = {name: tuple(values.split(",")) if values else () for name, _, values in words}
    return FlagGroup(subject.title, flag_class, {**of_rows, **written})
