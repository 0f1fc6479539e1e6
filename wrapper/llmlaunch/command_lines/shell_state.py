"""What a shell knows at one line of a script: variables, functions, the current folder, files that were written.

A variable without a value stays in a text between two marks that no script may hold; `shown` turns them into `${NAME}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from llmlaunch.command_lines.command import Unset
from llmlaunch.command_lines.shell_tree import Node
from llmlaunch.errors import UserError

__all__ = [
    "MOST_TEXT",
    "Record",
    "ShellCommand",
    "State",
    "Value",
    "file_text",
    "has_unset",
    "plain",
    "shown",
    "unset_names",
]

MOST_STEPS = 20_000
MOST_TEXT = 1 << 20

_OPEN, _CLOSE = "\ue000", "\ue001"
_MARKED = re.compile(f"{_OPEN}(\\w+){_CLOSE}")

Value = str | list[str] | dict[str, str]


@dataclass(frozen=True)
class ShellCommand:
    """A program that a script starts, its words expanded; never started here.

    A variable without a value stays in its word as `${NAME}`. Bash drops a word that is nothing but such variables;
    here it stays, because the value of an option (`--num-layers $N`) has to be asked for, and only the reader of that
    option knows whether it takes one. Readers drop it where no value is missing: `command.is_optional`,
    `command.option_values`.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    line: int
    script: str  # the file that holds the line
    files: Mapping[str, str] = field(default_factory=dict)  # what the script had written before
    given: Mapping[str, str] = field(default_factory=dict)  # what the environment of the script holds


@dataclass
class Record:
    """What reading a script yields, shared by all its subshells, and how much work it was."""

    name: str
    commands: list[ShellCommand] = field(default_factory=list)
    unset: dict[str, Unset] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    computed: set[str] = field(default_factory=set)  # names that stand for a program's output
    steps: int = 0
    characters: int = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise UserError(f"{self.name}: takes more than {MOST_STEPS} steps; write the command out that it starts")

    def produce(self, text: str) -> str:
        self.characters += len(text)
        if self.characters > 32 * MOST_TEXT:
            raise UserError(f"{self.name}: its variables grow too large; write the command out that it starts")
        return text


@dataclass
class State:
    record: Record
    script: str
    path: str
    folder: str
    given: Mapping[str, str]
    arguments: list[str]
    has_arguments: bool
    variables: dict[str, Value] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    functions: dict[str, Node] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # by absolute path
    written_as: dict[str, str] = field(default_factory=dict)  # their paths as the script has them
    output: list[str] | None = None
    input: str | None = None
    depth: int = 0

    def subshell(self) -> State:
        """A shell that starts with all that this one knows and whose changes are lost."""
        variables = {
            name: value.copy() if not isinstance(value, str) else value for name, value in self.variables.items()
        }
        state = State(
            self.record, self.script, self.path, self.folder, self.given, list(self.arguments), self.has_arguments
        )
        state.variables, state.exported, state.functions = variables, set(self.exported), dict(self.functions)
        state.files, state.written_as = self.files, self.written_as
        state.input, state.depth, state.output = self.input, self.depth, self.output
        return state

    def unset(self, name: str, line: int, computed: bool = False) -> str:
        """Return the value that a person gave a variable which the script does not set, or a mark with its name."""
        if name in self.given:
            return self.given[name]
        self.record.unset.setdefault(name, Unset(name, line))
        if computed:
            self.record.computed.add(name)
        return f"{_OPEN}{name}{_CLOSE}"

    def note(self, line: int, text: str) -> None:
        self.record.notes.setdefault(f"{self.script}:{line}: {text}")

    def assign(self, name: str, value: Value) -> None:
        if isinstance(value, str):
            self.record.produce(value)
        self.variables[name] = value

    def environment(self) -> dict[str, str]:
        values = {name: self.variables.get(name) for name in sorted(self.exported)}
        return {name: shown(value) for name, value in values.items() if isinstance(value, str)}

    def is_null(self, text: str) -> bool:
        """Whether a shell that nobody gave an environment or arguments would find nothing here."""
        return all(name not in self.record.computed for name in unset_names(text)) and not _MARKED.sub("", text)

    def resolved(self, path: str) -> str:
        """Return a path of the script as an absolute one, where no variable without a value begins it."""
        return path if path.startswith(_OPEN) else normal(PurePosixPath(self.folder) / path)

    def text_of(self, path: str) -> str | None:
        """Return what the script wrote to a file, or what the file that lies there holds; None where neither is."""
        place = self.resolved(path)
        if place in self.files:
            return self.files[place]
        if has_unset(place):
            return None
        text = file_text(Path(place))
        return None if text is None else plain(text)


def file_text(path: Path) -> str | None:
    """Return the text of a small regular file, None where there is none."""
    try:
        if not path.is_file() or path.stat().st_size > MOST_TEXT:
            return None
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return None


def normal(path: PurePosixPath) -> str:
    """Return a path without `.` and `..`, as `cd` and `pwd` have it."""
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            del parts[1 if parts[:1] == ["/"] and len(parts) == 1 else -1 :]
        else:
            parts.append(part)
    return str(PurePosixPath(*parts))


def plain(text: str) -> str:
    """Return text without the characters that mark variables."""
    return text.replace(_OPEN, "").replace(_CLOSE, "")


def shown(text: str) -> str:
    """Return text with `${NAME}` for each variable without a value."""
    return _MARKED.sub(r"${\1}", text)


def has_unset(text: str) -> bool:
    return _OPEN in text


def unset_names(text: str) -> list[str]:
    return _MARKED.findall(text)
