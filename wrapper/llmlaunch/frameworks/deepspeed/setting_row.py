"""The row of a key of ds_config.json, and the forms that a value may have."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from llmlaunch.command_lines.recipe_draft import true_or_false
from llmlaunch.frameworks.argument import Reason, planned_value
from llmlaunch.frameworks.classed_arguments import FlagGroup, flag_table, with_rows
from llmlaunch.frozen import frozen
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir.foreign_values import MOST_WHOLE

ABSENT: Any = object()
"""What stands for the value of a key that is not written."""


@frozen
class Form:
    """What a value must be, in words, and the test of one that is neither null nor "auto"."""

    words: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= 1e300 and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return _is_number(value) and value == int(value) and abs(value) <= MOST_WHOLE


def _is_switch(value: Any) -> bool:
    return type(value) is bool or (type(value) is int and value in (0, 1)) or str(value).lower() in ("true", "false")


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))


ANY = Form("anything", lambda value: True)
MAPPING = Form("a mapping", lambda value: isinstance(value, Mapping))
WHOLE = Form("a whole number", _is_whole)
COUNT = Form("a whole number of at least 0", lambda value: _is_whole(value) and value >= 0)
SIZE = Form("a whole number of at least 1", lambda value: _is_whole(value) and value >= 1)
STAGE = Form("0, 1, 2 or 3", lambda value: _is_whole(value) and 0 <= value <= 3)
NUMBER = Form("a number", _is_number)
SHARE = Form("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
SWITCH = Form("true or false", _is_switch)
TEXT = Form("a text", lambda value: isinstance(value, str))
DEVICE = Form("none, cpu or nvme", lambda value: value in ("none", "cpu", "nvme") and isinstance(value, str))
BETAS = Form("a list of two numbers", _is_pair)


def above_one(value: Any) -> Any:
    """Return a size that splits something; ABSENT for one that leaves it whole."""
    return value if value > 1 else ABSENT


def as_number(value: Any) -> Any:
    """Return a number as it is; ABSENT for anything else, such as a text."""
    return value if isinstance(value, (int, float)) else ABSENT


def switched(on: Any) -> Callable[[Any], Any]:
    """Return a reader of a switch: `on` where it is true, ABSENT where it is false."""
    return lambda value: on if true_or_false(value) else ABSENT


def _nothing(recipe: Recipe, layout: Layout) -> Any:
    return ABSENT


@frozen
class DeepSpeedRow:
    """What is written, as a rule from one recipe key.

    Attributes:
        key: Its name: dotted as in ds_config.json, or that of an argument.
        form: What a value must be where a file is read.
        subject: The group of flag_classes.json whose class it has as an argument of the person's own, where no word of
            another group holds it.
        of: Recipe keys that decide the rendered value, where it is not the one that is written, or that of `reads`;
            `why` says what a reader would not guess from them.
        write: Returns the rendered value, ABSENT where nothing is rendered; or the recipe key whose value is.
        reads: The recipe key that it is read into.
        since, until: The first release that has it, and the first that has it no more.
    """

    key: str
    form: Form = ANY
    subject: str = ""
    of: str | tuple[str, ...] = ()
    why: str = ""
    write: str | Callable[[Recipe, Layout], Any] = _nothing
    reads: str = ""
    since: str = ""
    until: str | None = None

    @property
    def is_rendered(self) -> bool:
        """Whether rendering writes it for some recipe."""
        return self.write is not _nothing

    @property
    def keys(self) -> tuple[str, ...]:
        """The recipe keys that decide the rendered value."""
        keys = self.of or (self.write if isinstance(self.write, str) else self.reads) or ()
        return (keys,) if isinstance(keys, str) else keys

    def value(self, recipe: Recipe, layout: Layout) -> Any:
        """Return the rendered value; ABSENT where nothing is rendered."""
        if not isinstance(self.write, str):
            return self.write(recipe, layout)
        value = planned_value(recipe, layout, self.write)
        return ABSENT if value is None else value


@frozen
class DsConfigKey(DeepSpeedRow):
    """One key of ds_config.json.

    Attributes:
        planned: Whether the recipe decides it, so that `backend.ds_config` may not say it.
        read: Returns the value of the recipe key that a file's value is read into, ABSENT for a value that says
            nothing; `kept` leaves the key in the file all the same. What several keys say together (the batch, what
            leaves the device) is read by functions of read_config.py and command_line.py, the inverses of `write`.
        unwritten: By ZeRO stage, what reading writes for a file that lacks the key: DeepSpeed's default, where
            rendering would write something else.
        left_out: Why reading leaves it out of a file whose states are on NVMe.
        adds: Why rendering may add the key to a file that was read without it, where that is not DeepSpeed's default.
        prices: The field of Gathering that its number sets; `automatic` is what "auto" stands for.
        old: Other names that DeepSpeed takes for it.
        splits: The size of the layout above 1 with which it is rendered.
        uncounted: Whether it changes what is computed or kept in ways that no estimate counts.
    """

    planned: bool = False
    read: Callable[[Any], Any] = lambda value: value
    kept: bool = False
    unwritten: tuple[Any, Any, Any, Any] = (ABSENT,) * 4
    left_out: str = ""
    adds: str = ""
    prices: str = ""
    automatic: Callable[[Recipe], int] | None = None
    old: tuple[str, ...] = ()
    since: str = "0.3"  # any
    splits: str = ""
    uncounted: bool = False

    @property
    def reason(self) -> Reason:
        """Return why the rendered value is as it is."""
        return Reason(self.keys, self.why)

    def is_in(self, version: str) -> bool:
        """Return whether a version of DeepSpeed has the key. Of "0.19" what any 0.19 has is taken to be in it, and of a
        version without numbers everything."""
        number, until = _number_of(version), _number_of(self.until or "")
        removed = bool(until) and (number >= until if len(number) >= len(until) else number > until[: len(number)])
        return not removed and not self.is_after(version)

    def is_after(self, version: str) -> bool:
        """Return whether the key came after a version of DeepSpeed."""
        number = _number_of(version)
        return number < _number_of(self.since)[: len(number)]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the dotted names that DeepSpeed takes for it, the key first."""
        section = self.key.rpartition(".")[0]
        return (self.key, *(f"{section}.{name}" for name in self.old))


def _number_of(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, such as (0, 19, 8); the part behind them, as in 0.19.8+cu128, is left out."""
    return tuple(map(int, re.findall(r"\d{1,9}", version.partition("+")[0])[:3]))


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
