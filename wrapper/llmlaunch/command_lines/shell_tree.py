"""A script as a tree: the kinds of commands that bash has, and the parts of their words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LiteralText:
    text: str
    quoted: bool = False
    splits: bool = False  # of `${X:-…}`, which is split into words


@dataclass(frozen=True)
class Parameter:
    """`$name`, `${name[index]operator argument}`; `prefix` is "#" for a length and "!" for an indirect name."""

    name: str
    line: int
    quoted: bool = False
    prefix: str = ""
    index: Word | None = None
    operator: str = ""
    argument: Word = ()


@dataclass(frozen=True)
class Substitution:
    """`$(…)`, backquotes, or `<(…)`, which is a file with the output."""

    body: Statements
    line: int
    quoted: bool = False
    file: bool = False


@dataclass(frozen=True)
class Arithmetic:
    """`$((…))`; the expression before its variables are expanded."""

    expression: Word
    line: int
    quoted: bool = False


Part = LiteralText | Parameter | Substitution | Arithmetic
Word = tuple[Part, ...]


@dataclass(frozen=True)
class Assignment:
    name: str
    value: Word | tuple[Word, ...]
    array: bool = False
    append: bool = False
    index: Word | None = None


@dataclass(frozen=True)
class Redirect:
    operator: str
    target: Word  # a here-document's body


@dataclass(frozen=True)
class Simple:
    assignments: tuple[Assignment, ...]
    words: tuple[Word | Assignment, ...]  # assignments are arguments of `export` and its like
    line: int
    redirects: Sequence[Redirect] = ()  # a here-document is filled in when the line ends, after the command is read


@dataclass(frozen=True)
class Pipeline:
    commands: tuple[Node, ...]
    negated: bool
    line: int


@dataclass(frozen=True)
class AndOr:
    left: Node
    operator: str
    right: Node
    line: int


@dataclass(frozen=True)
class Statements:
    statements: tuple[Node, ...]
    redirects: Sequence[Redirect] = ()
    subshell: bool = False


@dataclass(frozen=True)
class If:
    branches: tuple[tuple[Statements, Statements], ...]
    otherwise: Statements | None
    line: int


@dataclass(frozen=True)
class For:
    name: str
    words: tuple[Word, ...] | None
    body: Statements
    line: int


@dataclass(frozen=True)
class CountingFor:
    """`for ((first; condition; next))`."""

    expressions: tuple[Word, Word, Word]
    body: Statements
    line: int


@dataclass(frozen=True)
class While:
    condition: Statements
    body: Statements
    until: bool
    line: int


@dataclass(frozen=True)
class CaseItem:
    patterns: tuple[Word, ...]
    body: Statements
    ending: str  # ;; or ;& or ;;&


@dataclass(frozen=True)
class CaseCommand:
    word: Word
    items: tuple[CaseItem, ...]
    line: int


@dataclass(frozen=True)
class Function:
    name: str
    body: Node


@dataclass(frozen=True)
class Conditional:
    """`[[ … ]]`, of which operators and brackets are words, too, or `(( … ))` of one expression."""

    words: tuple[Word, ...]
    line: int
    arithmetic: bool = False


Node = (
    Simple | Pipeline | AndOr | Statements | If | For | CountingFor | While | CaseCommand | Function | Conditional
)  # fmt: skip
