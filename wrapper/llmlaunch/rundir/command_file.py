"""`command.txt`: the training command of a layout, one argument on a line, which a person can read and edit, and from
which each node starts its ranks.

    "${LLMLAUNCH_RUN_DIR}"/trainer/train.py
    --micro-batch-size 4                      # layout.micro_batch_size

Words are quoted as in a shell: single quotes keep everything, double quotes let `${NAME}` stand for a variable of the
node, `#` at the start of a word begins a comment, `\\` at the end of a line joins it with the next. Nothing else of a
shell is understood, and no shell reads the file.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_PIECE = re.compile(
    rf"""'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)"|\\(?P<joined>\r?\n)|\\(?P<escaped>.)"""
    rf"""|(?P<variable>\$(?:{_NAME}|\{{{_NAME}\}}))"""
    r"""|(?P<plain>[^ \t\r\n'"\\$]+)""",
    re.DOTALL,
)
_IN_DOUBLE_QUOTES = re.compile(rf'\\(?P<joined>\r?\n)|\\(?P<escaped>["\\$`])|(?P<variable>\$(?:{_NAME}|\{{{_NAME}\}}))')
_BLANKS_AND_COMMENTS = re.compile(r"(?:[ \t\r\n]+|\\\r?\n|#[^\n]*)*")


class CommandError(ValueError):
    """A command file that does not say which words it means: the line, and what is wrong there."""


def command_words(text: str, variables: Mapping[str, str]) -> list[str]:
    """Return the words of a command file, with `variables` in the place of their names. Raises CommandError."""
    words = []
    at = _skip_blanks(text, 0)
    while at < len(text):
        word, at = _word(text, at, variables)
        words.append(word)
        at = _skip_blanks(text, at)
    if not words:
        raise CommandError("holds no command")
    return words


def _skip_blanks(text: str, at: int) -> int:
    match = _BLANKS_AND_COMMENTS.match(text, at)
    return at if match is None else match.end()


def _word(text: str, at: int, variables: Mapping[str, str]) -> tuple[str, int]:
    """Return the word that begins at `at`, and where it ends."""
    parts: list[str] = []
    while at < len(text) and text[at] not in " \t\r\n":
        match = _PIECE.match(text, at)
        if match is None:
            raise CommandError(f"line {_line(text, at)}: {_problem(text[at])}")
        parts.append(_value(match, text, at, variables))
        at = match.end()
    return "".join(parts), at


def _value(match: re.Match[str], text: str, at: int, variables: Mapping[str, str]) -> str:
    """Return what a piece of a word stands for, or a piece within its double quotes; it begins at `at`."""
    kind = match.lastgroup
    assert kind is not None
    if kind == "double":
        return _IN_DOUBLE_QUOTES.sub(lambda inner: _value(inner, text, at, variables), match[kind])
    if kind == "joined":
        return ""
    if kind != "variable":
        return match[kind]
    name = match[kind].strip("${}")
    if name not in variables:
        raise CommandError(f"line {_line(text, at)}: the variable {name} is not set on this node")
    return variables[name]


def _problem(character: str) -> str:
    if character in "'\"":
        return f"the quote {character} is not closed"
    return "a $ stands before no name; put the word in single quotes" if character == "$" else "a \\ ends the file"


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1
