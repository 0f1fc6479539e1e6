"""What a shell knows at one line of a script: variables, functions, the current folder, files that were written.

A variable without a value stays in a text between two marks that no script may hold; `shown` turns them into `${NAME}`.
"""

from __future__ import annotations

import posixpath
import re
import stat
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmlaunch.command_lines.command import Unset
from llmlaunch.command_lines.shell_tree import Node
from llmlaunch.errors import UserError
from llmlaunch.rundir.foreign_values import whole_number_in

MOST_TEXT = 1 << 20
LONGEST_PATH = 4096  # PATH_MAX of Linux

_OPEN, _CLOSE = "\ue000", "\ue001"
_MARKED = re.compile(f"{_OPEN}(\\w+){_CLOSE}")
# set by SLURM and by MPI for a job or a rank, and so never empty where the script runs
_OF_THE_JOB = ("SLURM_", "PMI", "OMPI_")
_OF_BASH = ("HOSTNAME", "RANDOM", "SECONDS", "UID", "EUID", "PPID", "BASHPID", "LINENO", "process_id", "shell_options")


class Array(dict[str, str]):
    """The entries of an array by their indexes as text, or of a map (`declare -A`) by its keys."""

    def __init__(self, entries: Iterable[str] = (), keyed: bool = False) -> None:
        super().__init__((str(index), entry) for index, entry in enumerate(entries))
        self.keyed = keyed

    def copy(self) -> Array:
        twin = Array(keyed=self.keyed)
        twin.update(self)
        return twin

    def indexes(self) -> list[str]:
        return list(self) if self.keyed else sorted(self, key=int)

    def entries(self) -> list[str]:
        return [self[index] for index in self.indexes()]

    def following(self) -> int:
        """Return the index after the last."""
        return max(map(int, self), default=-1) + 1


Value = str | Array


@dataclass
class ReadingBudget:
    """The work that is left for a script and all that it sources and starts; counted before it is done."""

    name: str  # of the script
    commands: int = 20_000
    words: int = 100_000
    characters: int = 32 * MOST_TEXT
    parsed_characters: int = 2 * MOST_TEXT
    files: int = 200
    file_bytes: int = 8 * MOST_TEXT

    def spend(self, kind: str, amount: int = 1) -> None:
        """Raise UserError where less is left than this."""
        left = getattr(self, kind) - amount
        if left < 0:
            most = f"{ReadingBudget.__dataclass_fields__[kind].default:,} {kind.replace('_', ' ')}"
            raise UserError(f"{self.name}: takes more than {most} to read; write out the command that it starts")
        setattr(self, kind, left)


@dataclass(frozen=True)
class ShellCommand:
    """A program that a script starts, its words expanded; never started here.

    A variable without a value stays in its word as `${NAME}`. Bash drops a word that is nothing but such variables;
    here it stays, because the value of an option (`--num-layers $N`) has to be asked for, and only the reader of that
    option knows whether it takes one. Readers drop it where no value is missing: `command.is_optional`,
    `command.option_values`. `source` of a file that is not here is a command, too: its setup may need it.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    line: int
    script: str  # the file that holds the line
    files: Mapping[str, str] = field(default_factory=dict)  # what the script had written before
    given: Mapping[str, str] = field(default_factory=dict)  # what the environment of the script holds
    budget: ReadingBudget | None = field(
        default=None, compare=False, repr=False
    )  # what is left for scripts that it starts


@dataclass
class Record:
    """What reading a script yields, shared by all its subshells."""

    name: str
    budget: ReadingBudget
    commands: list[ShellCommand] = field(default_factory=list)
    unset: dict[str, Unset] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    computed: set[str] = field(default_factory=set)  # names that stand for a program's output
    assumed: dict[str, None] = field(default_factory=dict)  # variables that a condition took as empty
    reasons: list[Iterable[str]] = field(default_factory=list)  # why the branches were taken that are being read
    ended: str | None = None
    files: dict[str, str] | None = None  # of the last command, until another one is written


@dataclass
class Input:
    """What a command reads."""

    text: str
    position: int = 0

    def rest(self) -> str:
        start, self.position = self.position, len(self.text)
        return self.text[start:]

    def line(self, end: str) -> tuple[str, bool]:
        """Return the text up to a character, and whether it is there; without one, all that is left."""
        stop = self.text.find(end, self.position) if end else -1
        if stop < 0:
            return self.rest(), False
        start, self.position = self.position, stop + 1
        return self.text[start:stop], True


@dataclass
class State:
    record: Record
    script: str
    path: str
    folder: str
    start: str  # where the script is
    given: Mapping[str, str]
    arguments: list[str]
    has_arguments: bool
    variables: dict[str, Value] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    references: dict[str, str] = field(default_factory=dict)  # declare -n
    functions: dict[str, Node] = field(default_factory=dict)
    calls: list[dict[str, Value | None]] = field(default_factory=list)  # of each function what its locals hide
    loops: int = 0
    is_subshell: bool = False
    stops_at_unset: bool = False  # set -u
    is_sourced: bool = False
    letters_read: int = 0  # by getopts, of a word
    folders: list[str] = field(default_factory=list)  # pushd
    files: dict[str, str] = field(default_factory=dict)  # by absolute path
    written_as: dict[str, str] = field(default_factory=dict)  # their paths as the script has them
    output: list[str] | None = None
    input: Input | None = None
    depth: int = 0
    changes: int = 0
    shared_environment: Mapping[str, str] | None = None
    exports_all: bool = False  # set -a

    def subshell(self) -> State:
        """A shell that starts with all that this one knows and whose changes are lost."""
        self.spend(4 * len(self.variables))
        copies = {name: value if isinstance(value, str) else value.copy() for name, value in self.variables.items()}
        return replace(
            self, variables=copies, arguments=list(self.arguments), exported=set(self.exported),
            references=dict(self.references), functions=dict(self.functions), folders=list(self.folders),
            calls=[dict(hidden) for hidden in self.calls], is_subshell=True,
        )  # fmt: skip

    def spend(self, characters: int) -> None:
        self.record.budget.spend("characters", characters)

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

    def ends(self, command: str, line: int, why: str, goes_on: bool = False) -> None:
        """Note where the script ends and why; `goes_on`: it is read on as if what is missing were there."""
        where = f"line {line}" + (f" of {self.script}" if self.script != self.record.name else "")
        if goes_on:
            self.note(line, f"`{command}` would end the script, {why}; what follows is read all the same")
        if not goes_on or self.record.ended is None:
            self.record.ended = f"reading ended at `{command}`, {where}" + (f", {why}" if why else "")

    def target(self, name: str) -> str:
        """Return the variable that a name of `declare -n` stands for."""
        for _ in range(8):
            name = self.references.get(name, name)
        return name

    def assign(self, name: str, value: Value) -> None:
        name = self.target(name)
        if self.exports_all:
            self.export(name)
        old = self.variables.get(name)
        if old is value or (isinstance(value, str) and old == value):
            return
        self.spend(len(value))
        self.variables[name] = value
        self.changed(name)

    def assign_entry(self, name: str, index: str, value: str) -> None:
        """Set an entry of an array or a map; an index that is no number makes a map."""
        name = self.target(name)
        array = self.variables.get(name)
        if not isinstance(array, Array):
            array = Array([array] if array else [], keyed=whole_number_in(index.lstrip("-")) is None)
        if not array.keyed and index.startswith("-"):
            index = str(array.following() + int(index))
        if not array.keyed and whole_number_in(index) is None:
            return
        self.spend(len(value) + 1)
        array[index if array.keyed else str(int(index))] = value
        self.variables[name] = array
        self.changed(name)

    def remove(self, name: str) -> None:
        if self.variables.pop(self.target(name), None) is not None:
            self.changed(self.target(name))

    def restore(self, name: str, value: Value | None) -> None:
        if value is None:
            self.remove(name)
        elif self.variables.get(name) is not value:
            self.variables[name] = value
            self.changed(name)

    def hide(self, name: str) -> None:
        """Make a variable local to the function that is running."""
        if name not in self.calls[-1]:
            self.calls[-1][name] = self.variables.pop(name, None)
            self.references.pop(name, None)
            self.changed(name)

    def export(self, name: str) -> None:
        self.exported.add(name)
        self.shared_environment = None

    def unexport(self, name: str) -> None:
        self.exported.discard(name)
        self.shared_environment = None

    def changed(self, name: str) -> None:
        self.changes += 1
        if name in self.exported or name in self.given:
            self.shared_environment = None

    def environment(self) -> Mapping[str, str]:
        """Return what a program gets that the environment of the script does not hold."""
        if self.shared_environment is None:
            values = {name: self.variables.get(name) for name in sorted(self.exported | self.given.keys())}
            own = {
                name: value
                for name, value in values.items()
                if isinstance(value, str) and (name in self.exported or value != self.given[name])
            }
            self.spend(sum(len(name) + len(value) + 64 for name, value in own.items()))
            self.shared_environment = {name: shown(value) for name, value in own.items()}
        return self.shared_environment

    def written_files(self) -> Mapping[str, str]:
        """Return the text of the files that the script wrote, by their paths as written and as absolute ones."""
        if self.record.files is None:
            self.spend(sum(map(len, self.files.values())))
            texts = {path: shown(text) for path, text in self.files.items()}
            written = {shown(path): texts[place] for path, place in self.written_as.items()}
            self.record.files = written | {shown(path): text for path, text in texts.items()}
        return self.record.files

    def write(self, path: str, text: str, append: bool) -> None:
        place = self.resolved(path)
        before = self.files.get(place, "") if append else ""
        if not place.startswith("/dev/"):
            self.spend(len(before) + len(text))
            self.files[place] = before + text
            self.written_as[path] = place
            self.record.files = None

    def is_null(self, text: str) -> bool:
        """Return whether a shell that nobody gave an environment or arguments would find nothing here."""
        return not any(map(self.is_of_the_run, unset_names(text))) and not _MARKED.sub("", text)

    def is_of_the_run(self, name: str) -> bool:
        """Return whether a program, SLURM or bash itself gives a variable its value."""
        return name in self.record.computed or name in _OF_BASH or name.startswith(_OF_THE_JOB)

    def known(self, text: str, line: int) -> str | None:
        """Return a text with what nobody sets or gives as empty, as in a fresh shell; None where a program or SLURM
        sets a part of it."""
        names = unset_names(text)
        if any(map(self.is_of_the_run, names)):
            return None
        for name in names:
            self.assume(name, line)
        return _MARKED.sub("", text) if names else text

    def assume(self, name: str, line: int) -> None:
        """Note that a condition counts a variable as empty, or that the script has no arguments ("#")."""
        if whole_number_in(name) is not None:
            self.note(line, f"${name} has no value here and counts as empty; --set {name}=VALUE gives it one")
        elif name != "#":
            self.note(line, f"{name} is taken as not set")
        self.record.assumed[name] = None

    def resolved(self, path: str) -> str:
        """Return a path of the script as an absolute one, where no variable without a value begins it."""
        self.spend(len(self.folder) + len(path))
        return path if path.startswith(_OPEN) else posixpath.normpath(posixpath.join(self.folder, path))

    def text_of(self, path: str) -> str | None:
        """Return what the script wrote to a file, or what the file holds that is here: below the script's current
        folder, beside the script, or in the working directory. None where there is none."""
        place = self.resolved(path)
        if place in self.files:
            return self.files[place]
        if has_unset(place):
            return None
        for folder in dict.fromkeys((self.folder, self.start, str(Path.cwd()))):
            text = file_text(Path(folder) / path, self.record.budget)
            if text is not None:
                return plain(text)
        return None


def file_text(path: Path, budget: ReadingBudget | None = None) -> str | None:
    """Return the text of a small regular file, None where there is none. Raises UserError where the budget ends."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_TEXT:
            return None
        if budget is not None:
            budget.spend("files")
            budget.spend("file_bytes", status.st_size)
        with path.open("rb") as file:
            return file.read(status.st_size).decode("utf-8", "replace").replace("\r\n", "\n")
    except (OSError, ValueError):
        return None


def exists(place: str | Path) -> bool:
    """Return whether there is something here; False where the path is none."""
    try:
        return Path(place).exists()
    except (OSError, ValueError):
        return False


def reason(names: Iterable[str], variables: Container[str] = ()) -> str:
    """Return the end of a sentence: because these variables, or arguments of the script, have no value. `variables`
    are those that the script sets."""
    causes = [
        "the script has no arguments (write them after it)"
        if name == "#"
        else f"${name} has no value here (--set {name}=VALUE)"
        if whole_number_in(name) is not None
        else f"{name} is {'empty' if name in variables else 'not set'}"
        for name in dict.fromkeys(names)
    ]
    return f"because {' and '.join(causes)}" if causes else ""


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
