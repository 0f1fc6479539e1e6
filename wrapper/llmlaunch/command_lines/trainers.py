"""Who trains in a command: trainers that are read, trainers that are refused by name, and tools that do not train.

The table is trainers.json, with the sources of its names. The first row that matches counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from llmlaunch.errors import NoVerdict
from llmlaunch.frozen import frozen

MEGATRON_DEEPSPEED = "Megatron-DeepSpeed"
FSDP = "PyTorch's FSDP"
TRAINS = re.compile(r"train|tune|sft")


@frozen
class TrainerRow:
    """A row of the table.

    `reader` is the function that reads the trainer's commands, as `module:function`; empty where it is refused by
    `name`. `programs` are patterns of the end of its path or module, without `.py` and with slashes, `commands` the
    first words of a command that starts it. `words` are patterns of its own options, without dashes and with
    underscores, and of its other words; a row with `words_too` needs a word of both. `imports` are modules that its
    script imports. One of these is enough, or `all` of those that the row has. `bare` is whether a program by that
    name trains without any option that other trainers know, and without a launcher. `model` are the options that name
    the model, the first that is written counts. `nodes` and `devices` are the variables of the environment that say how
    many it starts itself; `single`: without them it starts one rank, otherwise one for each device.
    """

    name: str
    reader: str = ""
    programs: Sequence[str] = ()
    commands: Sequence[Sequence[str]] = ()
    words: Sequence[str] = ()
    words_too: Sequence[str] = ()
    imports: Sequence[str] = ()
    all: bool = False
    bare: bool = True
    model: Sequence[str] = ()
    nodes: Sequence[str] = ()
    devices: Sequence[str] = ()
    single: bool = False

    def starts(self, program: str, arguments: Sequence[str]) -> bool:
        """Return whether the first words of a command start this trainer."""
        words = [PurePath(program).name, *arguments[:1]]
        return any(words[: len(command)] == list(command) for command in self.commands)

    def is_named(self, path: str) -> bool:
        """Return whether a path, from any of its folders on, is one of the patterns."""
        parts = PurePath(path).parts
        tails = ["/".join(parts[index:]) for index in range(len(parts))]
        return any(fnmatchcase(tail, pattern) for tail in tails for pattern in self.programs)


@cache
def _table() -> tuple[tuple[TrainerRow, ...], TrainerRow]:
    """Return the trainers in the order in which they are looked for, and the tools."""
    document: dict[str, Any] = json.loads(Path(__file__).with_name("trainers.json").read_text("utf-8"))
    readers = {"": "", **document["readers"]}
    rows = (TrainerRow(**{**row, "reader": readers[row.get("reader", "")]}) for row in document["trainers"])
    return tuple(rows), TrainerRow("tools", programs=document["tools"])


def trainer_of(program: str, arguments: Sequence[str], source: Callable[[], str] = str) -> TrainerRow:
    """Return the trainer of a command; the last row is any other script.

    Args:
        program: The path of a script, a module after `-m`, or a command.
        source: Returns the text of the script, empty where it is not here.
    """
    path, words = _path(program), [_word(argument) for argument in arguments]
    for row in _table()[0]:
        signs = []
        if row.programs or row.commands:
            signs.append(row.is_named(path) or row.starts(program, arguments))
        if row.words:
            signs.append(_any_matches(words, row.words) and (not row.words_too or _any_matches(words, row.words_too)))
        if row.imports:
            modules = "|".join(map(re.escape, row.imports))
            signs.append(re.search(rf"^(?:from|import) +(?:{modules})\b", source(), re.MULTILINE) is not None)
        if all(signs) if row.all else any(signs):
            return row
    raise AssertionError("the last row of trainers.json matches every program")


def model_options(family: str = "") -> tuple[str, ...]:
    """Return the options that name the model, the first that counts first: those of a trainer by its name in the table,
    then those of any other script."""
    rows = [row for row in _table()[0] if row.name == family]
    return tuple(dict.fromkeys(option for row in (*rows, _table()[0][-1]) for option in row.model))


def trains_by_name(program: str, arguments: Sequence[str]) -> bool:
    """Return whether a program without a launcher, or a command, is a trainer by its name alone."""
    path = _path(program)
    return any((row.bare and row.is_named(path)) or row.starts(program, arguments) for row in _table()[0])


def is_tool(program: str) -> bool:
    """Return whether a script is by its name one that converts, prepares or evaluates, and does not train."""
    return _table()[1].is_named(_path(program)) and TRAINS.search(PurePath(program).name) is None


def not_read(name: str, place: str) -> NoVerdict:
    """Return the error for a trainer that is not read; `place` is where its command is written."""
    return NoVerdict.on(place, f"{name} is not read; `llmlaunch observe --` measures it")


def _path(program: str) -> str:
    """Return a script's path or a module as one path with slashes, without `.py`."""
    if program.endswith(".py") or "/" in program:
        return program.removesuffix(".py")
    return program.replace(".", "/")


def _any_matches(words: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(word, pattern) for word in words for pattern in patterns)


def _word(argument: str) -> str:
    """Return an option without its dashes and its value, with underscores, and an assignment as it is; "" for any other
    word, which is a value."""
    if argument.startswith("--"):
        return argument.lstrip("-").partition("=")[0].replace("-", "_")
    return argument if "=" in argument else ""
