"""One row of the table of Megatron's arguments, and what its columns are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, field, fields, is_dataclass, replace
from functools import cache
from typing import Any, get_args, get_type_hints

from llmlaunch.frameworks.argument import Argument, NodeVariable, Reason, number, planned_value
from llmlaunch.frameworks.megatron.parser import KNOWN_VERSIONS, dest_of
from llmlaunch.frozen import frozen
from llmlaunch.layout import Layout
from llmlaunch.models.shape import ModelShape
from llmlaunch.recipe.training import Training
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import Techniques

Space = Mapping[str, Any]
"""Values by the parser's `dest` (namespace.py)."""
STAGES, HEADS = "layers_by_stage", "mtp_stage"
"""Names in a namespace that no flag has: all notations of uneven stages, and where one puts prediction heads."""
PATTERN = "hybrid_layer_pattern"
"""All layers of a hybrid, in a namespace without the stages that the flag of this name has."""
Read = Callable[[Space], object]


@frozen
class PlannedJob:
    """What is rendered: a recipe and the layout of its plan. `version` is that of Megatron core whose flags are
    written."""

    recipe: Recipe
    layout: Layout
    version: str

    @property
    def shape(self) -> ModelShape:
        return self.recipe.model

    @property
    def training(self) -> Training:
        return self.recipe.training

    @property
    def techniques(self) -> Techniques:
        return self.recipe.techniques

    def value(self, key: str) -> Any:
        """Return what the recipe or the plan has under a dotted key; None where a section of it is absent."""
        return planned_value(self.recipe, self.layout, key)


Write = Callable[[PlannedJob], object]


class Parsed:
    """Stands for the value that Megatron's parser makes of the flag's words."""


PARSED = Parsed()
MODEL = "model"
"""The section of Bridge with most of the fields that flags set."""
Field = tuple[str, Any]
"""A field of Bridge's ConfigContainer by its dotted name, and its value: PARSED, a function of that, or a constant."""


@frozen
class Explained:
    """A value to write with a reason of its own: `keys` and `why` take the place of the row's."""

    value: object
    keys: tuple[str, ...] | None = None
    why: str | None = None


@frozen
class SinceThen:
    """What a recipe learns that asks for a flag which its version of Megatron core lacks.

    `name` is that of the requirement, and `asked` whether a recipe asks for the flag. The recipe key, the sentence and
    the file that was read are the usual ones where nothing else is given.
    """

    name: str
    asked: Callable[[Recipe], bool]
    sentence: str = ""
    key: str = ""
    where: str = "megatron/training/arguments.py, core 0.16"


def _nothing(_: Any) -> None:
    return None


@frozen
class Flag:
    """One argument of Megatron-LM.

    `keys` are the recipe keys that decide it, empty where llmlaunch chooses, and `why` says what no reader would guess
    from them. `write` gives its value for a job: True writes the flag alone, None and False write nothing, a tuple
    writes several words. `reads` gives the recipe's keys from a command line's namespace, each by a function that is
    the inverse of `write`; None leaves the key out. `bridge` is what the flag sets in Megatron-Bridge: the section
    whose field has the flag's `dest` as its name, or the fields; None where Bridge has none, empty where Bridge knows
    what the flag says from elsewhere.

    `decides`: the recipe key to use where a person passes the flag on by themselves, which would change what is
    planned. `added` says why rendering adds the flag to a command line that lacks it, and `unread` why a recipe does
    not keep the value that a command line gives. `only_helps`: without the flag a training is the same, only slower,
    so a version of core that lacks it does without. `unsaid` tells of the values that no key can say, which stay the
    person's own argument, and with it that of `companion`. `since` is what a recipe learns whose version lacks the
    flag. `subject` is the group of flag_classes.json whose class the flag has where a person passes it on.
    """

    name: str
    keys: tuple[str, ...]
    write: Write = _nothing
    reads: Mapping[str, Read] = field(default_factory=dict)
    bridge: str | tuple[Field, ...] | None = None
    why: str = ""
    decides: str | None = None
    added: str = ""
    unread: str = ""
    only_helps: bool = False
    unsaid: Callable[[Sequence[str]], bool] | None = None
    companion: str = ""
    since: SinceThen | None = None
    subject: str = ""

    @property
    def key(self) -> str:
        """The recipe key to write in place of the flag; empty where there is none."""
        return self.keys[0] if self.keys and self.writes else ""

    @property
    def dest(self) -> str:
        """The name under which Megatron's parser keeps the value."""
        return dest_of(self.name)

    @property
    def writes(self) -> bool:
        """Whether any recipe is written with it."""
        return self.write is not _nothing

    @property
    def dests(self) -> frozenset[str]:
        """Its names in the parsers of all known versions."""
        return frozenset(dest_of(self.name, version) for version in KNOWN_VERSIONS)

    @property
    def fields(self) -> tuple[Field, ...] | None:
        """What the flag sets in Bridge."""
        return ((f"{self.bridge}.{self.dest}", PARSED),) if isinstance(self.bridge, str) else self.bridge

    def arguments(self, job: PlannedJob) -> tuple[Argument, ...]:
        """Return the argument for a job, none where nothing is to be written."""
        value, keys, why = self.write(job), self.keys, self.why
        if isinstance(value, Explained):
            keys = self.keys if value.keys is None else value.keys
            why = self.why if value.why is None else value.why
            value = value.value
        if value is None or value is False:
            return ()
        words = () if value is True else value if isinstance(value, (tuple, list)) else (value,)
        texts = tuple(word if isinstance(word, NodeVariable) else str(word) for word in words)
        return (Argument(self.name, texts, Reason(keys, why)),)


Bridge = str | tuple[Field, ...] | None


def flag(
    name: str,
    keys: str | tuple[str, ...],
    bridge: Bridge = MODEL,
    *,
    form: Callable[[Any], object] | None = None,
    when: Callable[[PlannedJob], bool] | None = None,
    write: Write | None = None,
    read: Read | None = None,
    reads: Mapping[str, Read] | None = None,
    keeps_default: bool = False,
    **columns: Any,
) -> Flag:
    """Return a row. `bridge` is the section of Bridge whose field has the flag's `dest` as its name, or the fields.

    Without `write` the value is that of the first key, in `form`, `when` that holds. Without `read` and `reads` the key
    is the namespace's value, left out where it is absent, off, or the key's default; with `keeps_default` only where it
    is absent. `decides=True` names the first key, which a key of the layout without a subject is by itself;
    `added=True` says what `why` does.
    """
    names = (keys,) if isinstance(keys, str) else keys
    if reads is None:
        reads = {names[0]: read or (_stated(name) if keeps_default else _plain(name, names[0]))}
    value = write or _value_in(names[0], form)
    return Flag(name, names, _guarded(value, when), reads, bridge, **_completed(names, columns))


def chosen(
    name: str,
    value: object = True,
    bridge: Bridge = MODEL,
    *,
    keys: str | tuple[str, ...] = (),
    when: Callable[[PlannedJob], bool] | None = None,
    **columns: Any,
) -> Flag:
    """Return a row of a flag whose value no key decides: it follows from another choice, or llmlaunch chose."""
    names = (keys,) if isinstance(keys, str) else keys
    write = value if callable(value) else lambda _: value
    return Flag(name, names, _guarded(write, when), {}, bridge, **_completed(names, columns))


def alias(name: str, key: str, **columns: Any) -> Flag:
    """Return a row of a flag that is read, or refused beside a plan, and never written: another word for a key."""
    return Flag(name, (key,), **_completed((key,), columns))


def _completed(keys: tuple[str, ...], columns: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a row with those that follow from others."""
    planned = keys and keys[0].startswith("layout.") and "subject" not in columns
    if columns.get("decides", planned) is True:
        columns["decides"] = keys[0]
    if columns.get("added") is True:
        columns["added"] = columns["why"]
    return columns


def within(
    present: Callable[[Space], bool], *rows: Flag, when: Callable[[PlannedJob], bool] | None = None
) -> tuple[Flag, ...]:
    """Return rows that are read only where a section of the recipe is `present` in the namespace, and written only
    `when` a job has it."""
    return tuple(
        replace(
            row,
            write=_guarded(row.write, when) if row.writes else row.write,
            reads={key: _if(present, read) for key, read in row.reads.items()},
        )
        for row in rows
    )


def _if(present: Callable[[Space], bool], read: Read) -> Read:
    return lambda space: read(space) if present(space) else None


def _guarded(write: Write, when: Callable[[PlannedJob], bool] | None) -> Write:
    if when is None:
        return write
    return lambda job: write(job) if when(job) else None


def _value_in(key: str, form: Callable[[Any], object] | None) -> Write:
    def value(job: PlannedJob) -> object:
        stated = job.value(key)
        if form is None:
            return number(stated) if isinstance(stated, float) else stated
        return None if stated is None else form(stated)

    return value


def _plain(name: str, key: str) -> Read:
    def read(space: Space) -> object:
        value = space.get(dest_of(name))
        return None if value is None or value is False or value == default_of(key) else value

    return read


def _stated(name: str) -> Read:
    return lambda space: space.get(dest_of(name))


def default_of(key: str) -> object:
    """Return the default of a key of a recipe's model or training; None where it has none."""
    section, *sections, name = key.split(".")
    owner = SECTIONS.get(section)
    for below in sections:
        owner = _section(owner, below)
    default = next((each.default for each in fields(owner) if each.name == name), None) if owner else None
    return None if default is MISSING else default


SECTIONS: Mapping[str, Any] = {"model": ModelShape, "training": Training}


@cache
def _section(owner: Any, name: str) -> Any:
    """Return the class of the mapping that a key of a section holds, or None."""
    hint = get_type_hints(owner).get(name) if owner else None
    return next((each for each in (hint, *get_args(hint)) if is_dataclass(each)), None)


def one_of(value: object) -> object:
    """Return the value of a flag that takes several, where it has one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value
