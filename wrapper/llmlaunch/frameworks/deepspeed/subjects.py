"""What arguments of trainers and settings of DeepSpeed do to memory: flag_classes.json, and rows that say a subject."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from llmlaunch.frameworks.flag_classes import FlagGroup, flag_table, with_rows

FLAG_CLASSES = Path(__file__).with_name("flag_classes.json")


class ClassedRow(Protocol):
    """A row of a table: `key` is its name, `subject` the title of its group."""

    @property
    def key(self) -> str: ...

    @property
    def subject(self) -> str: ...


def deepspeed_groups(tables: Sequence[str], rows: Iterable[ClassedRow] = ()) -> tuple[FlagGroup, ...]:
    """Return the groups of some tables of the file, with the rows of a table of flags in them."""
    groups = (group for table in tables for group in flag_table(FLAG_CLASSES, table))
    return with_rows(groups, {row.key: row.subject for row in rows})
