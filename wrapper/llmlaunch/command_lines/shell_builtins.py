"""Commands whose outcome a script's text alone decides: `cd`, `echo`, `dirname`, `seq` and their like."""

from __future__ import annotations

import posixpath
import re
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from llmlaunch.command_lines.shell_arithmetic import NotComputable, compute
from llmlaunch.command_lines.shell_state import State, has_unset, shown
from llmlaunch.command_lines.shell_test import test_outcome
from llmlaunch.command_lines.shell_tree import LiteralText
from llmlaunch.command_lines.shell_words import Expander
from llmlaunch.rundir.foreign_values import whole_number_in

__all__ = ["BUILTINS", "PRINTERS", "Left"]


class Left(Exception):
    """The script, a function or a loop was left."""

    def __init__(self, command: str, levels: int = 1) -> None:
        super().__init__(command)
        self.command, self.levels = command, levels


class Shell(Protocol):
    """The shell that a builtin changes."""

    state: State
    words: Expander

    def read(self, text: str, first_line: int = 1) -> None: ...

    def print_(self, text: str | None) -> bool | None: ...

    def write(self, path: str, text: str, append: bool) -> None: ...


def _cd(shell: Shell, arguments: list[str], line: int) -> bool | None:
    places = [argument for argument in arguments if argument != "--"]
    if places and places[0] != "-":
        shell.state.folder = shell.state.resolved(places[0])
    return True


def _source(shell: Shell, arguments: list[str], line: int) -> bool | None:
    text = shell.state.text_of(arguments[0]) if arguments else None
    if text is None:
        shell.state.note(line, f"{shown(' '.join(arguments[:1]))} is not here and was not read")
        return None
    before = shell.state.script, shell.state.path
    shell.state.script, shell.state.path = Path(arguments[0]).name, shell.state.resolved(arguments[0])
    try:
        shell.read(text)
    except Left as left:
        if left.command != "return":
            raise
    finally:
        shell.state.script, shell.state.path = before
    return True


def _eval(shell: Shell, arguments: list[str], line: int) -> bool | None:
    shell.read(shown(" ".join(arguments)), line)
    return None


def _set(shell: Shell, arguments: list[str], line: int) -> bool | None:
    if "--" in arguments:
        shell.state.arguments = arguments[arguments.index("--") + 1 :]
        shell.state.has_arguments = True
    return True


def _shift(shell: Shell, arguments: list[str], line: int) -> bool | None:
    count = whole_number_in(arguments[0]) if arguments else 1
    if count is not None and count <= len(shell.state.arguments):  # otherwise bash shifts nothing
        del shell.state.arguments[:count]
    return True


def _unset(shell: Shell, arguments: list[str], line: int) -> bool | None:
    for name in arguments:
        shell.state.variables.pop(name, None)
        shell.state.exported.discard(name)
    return True


def _let(shell: Shell, arguments: list[str], line: int) -> bool | None:
    numbers = [shell.words.arithmetic((LiteralText(argument),), line) for argument in arguments]
    return None if not numbers or has_unset(numbers[-1]) else numbers[-1] != "0"


def _read_variables(shell: Shell, arguments: list[str], line: int) -> bool | None:
    flags = "".join(argument for argument in arguments if argument.startswith("-"))
    names = [argument for argument in arguments if argument.isidentifier()]
    if shell.state.input is not None and "a" not in flags and names:
        values = shell.state.input.strip("\n").split(None, len(names) - 1)
        for name, value in zip(names, [*values, *[""] * len(names)], strict=False):
            shell.state.assign(name, value)
        return None
    for name in names:
        shell.state.assign(name, shell.state.unset(name, line, computed=True))
    return None


def _test(shell: Shell, arguments: list[str], line: int) -> bool | None:
    words = arguments[:-1] if arguments[-1:] == ["]"] else arguments
    return test_outcome(shell.state, words, line)


def _tee(shell: Shell, arguments: list[str], line: int) -> bool | None:
    if shell.state.input is not None:
        for argument in arguments:
            if not argument.startswith("-"):
                shell.write(argument, shell.state.input, "-a" in arguments)
    return shell.print_(shell.state.input)


def _leaves(command: str) -> Callable[[Shell, list[str], int], bool | None]:
    """Return the builtin that leaves a script, a function or a loop."""

    def leave(shell: Shell, arguments: list[str], line: int) -> bool | None:
        levels = int(arguments[0]) if arguments and re.fullmatch(r"\d{1,3}", arguments[0], re.ASCII) else 1
        raise Left(command, levels)

    return leave


BUILTINS: dict[str, Callable[[Shell, list[str], int], bool | None]] = {
    "cd": _cd, "pushd": _cd, "source": _source, ".": _source, "eval": _eval, "set": _set, "shift": _shift,
    "unset": _unset, "let": _let, "read": _read_variables, "test": _test, "[": _test, "tee": _tee,
    ":": lambda shell, arguments, line: True, "true": lambda shell, arguments, line: True,
    "wait": lambda shell, arguments, line: True, "false": lambda shell, arguments, line: False,
    "exit": _leaves("exit"), "return": _leaves("return"), "break": _leaves("break"), "continue": _leaves("continue"),
}  # fmt: skip


def _operands(arguments: Sequence[str], flags: str = "") -> list[str] | None:
    """Return a command's arguments after its options; None where one is an option that is not read."""
    operands = list(arguments)
    while operands and operands[0].startswith("-") and len(operands[0]) > 1:
        option = operands.pop(0)
        if option == "--":
            break
        if not flags or not re.fullmatch(f"-[{flags}]+", option):
            return None
    return operands


def _echo(state: State, arguments: Sequence[str]) -> str | None:
    operands = list(arguments)
    end = "\n"
    while operands and re.fullmatch("-[neE]+", operands[0]):
        end = "" if "n" in operands.pop(0) else end
    return " ".join(operands) + end


def _printf(state: State, arguments: Sequence[str]) -> str | None:
    operands = _operands(arguments)
    if not operands:
        return None
    values = operands[1:]
    template = operands[0].replace("\\n", "\n").replace("\\t", "\t")
    pattern = re.compile(r"%(?:%|([-0]?\d{0,3})([sd]))")
    if "\\" in template or pattern.sub("", template).count("%"):
        return None
    printed = ""

    def value(match: re.Match[str]) -> str:
        if match[0] == "%%":
            return "%"
        text = values.pop(0) if values else ("" if match[2] == "s" else "0")
        width = match[1].lstrip("-")
        if match[1].startswith("0"):
            return text.rjust(int(width or 0), "0")
        return text.ljust(int(width or 0)) if match[1].startswith("-") else text.rjust(int(width or 0))

    while True:
        before = len(values)
        printed += pattern.sub(value, template)
        if not values or len(values) == before:
            return printed


def _dirname(state: State, arguments: Sequence[str]) -> str | None:
    operands = _operands(arguments)
    if not operands or has_unset(operands[0]):
        return None if not operands else _cut_unset(operands[0], front=True)
    return (posixpath.dirname(operands[0].rstrip("/") or "/") or ".") + "\n"


def _basename(state: State, arguments: Sequence[str]) -> str | None:
    operands = _operands(arguments)
    if not operands:
        return None
    if has_unset(operands[0]):
        return _cut_unset(operands[0], front=False)
    name = posixpath.basename(operands[0].rstrip("/")) or "/"
    suffix = operands[1] if len(operands) > 1 else ""
    return (name.removesuffix(suffix) if name != suffix else name) + "\n"


def _cut_unset(path: str, front: bool) -> str | None:
    """Return a folder or name where the variable without a value is in the other part."""
    folder, slash, name = path.rpartition("/")
    if front:
        return f"{folder}\n" if slash else None
    return f"{name}\n" if slash and not has_unset(name) else None


def _pwd(state: State, arguments: Sequence[str]) -> str | None:
    return state.folder + "\n"


def _realpath(state: State, arguments: Sequence[str]) -> str | None:
    operands = _operands(arguments, "femsL")
    return None if not operands else state.resolved(operands[0]) + "\n"


def _seq(state: State, arguments: Sequence[str]) -> str | None:
    if not 0 < len(arguments) < 4 or not all(re.fullmatch(r"-?\d{1,9}", argument) for argument in arguments):
        return None
    numbers = [int(argument) for argument in arguments]
    first, last = (1 if len(numbers) == 1 else numbers[0]), numbers[-1]
    step = numbers[1] if len(numbers) == 3 else 1
    if step == 0 or abs((last - first) // step) > 10_000:
        return None
    return "".join(f"{number}\n" for number in range(first, last + (1 if step > 0 else -1), step))


def _cat(state: State, arguments: Sequence[str]) -> str | None:
    if not arguments or list(arguments) == ["-"]:
        return state.input
    texts = [state.files.get(state.resolved(argument)) for argument in arguments]
    return None if None in texts else "".join(filter(None, texts))


def _expr(state: State, arguments: Sequence[str]) -> str | None:
    if not arguments or any(has_unset(argument) for argument in arguments):
        return None
    try:
        return f"{compute(' '.join(arguments), lambda name: 'x y', lambda name, value: None)}\n"
    except NotComputable:
        return None


def _bc(state: State, arguments: Sequence[str]) -> str | None:
    return None if state.input is None or arguments else _expr(state, state.input.split())


def _tr(state: State, arguments: Sequence[str]) -> str | None:
    if state.input is None or has_unset(state.input):
        return None
    deletes = list(arguments[:1]) == ["-d"]
    sets = [_set_of_tr(argument) for argument in arguments[deletes:]]
    if deletes and len(sets) == 1 and sets[0] is not None:
        return state.input.translate(dict.fromkeys(map(ord, sets[0])))
    if not deletes and len(sets) == 2 and sets[0] and sets[1]:
        return state.input.translate(
            dict(zip(map(ord, sets[0]), sets[1].ljust(len(sets[0]), sets[1][-1]), strict=False))
        )
    return None


_ESCAPES_OF_TR = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}
_CLASSES_OF_TR = {
    "space": string.whitespace, "blank": " \t", "digit": string.digits, "lower": string.ascii_lowercase,
    "upper": string.ascii_uppercase, "alpha": string.ascii_uppercase + string.ascii_lowercase,
    "alnum": string.digits + string.ascii_uppercase + string.ascii_lowercase, "punct": string.punctuation,
}  # fmt: skip
_PART_OF_TR = re.compile(
    r"\[:(?P<kind>[a-z]+):\]|\\(?P<escaped>[nrt\\])|(?P<first>[!-Z^-~])-(?P<last>[!-Z^-~])"
    r"|(?P<plain>(?!\[[=:]|\[.\*)[^\\])",
    re.DOTALL,
)


def _set_of_tr(text: str) -> str | None:
    """Return the characters of a set of tr(1): `a-z`, `[:space:]`, `\\r`; None for a notation that is not read."""
    characters, position = "", 0
    while position < len(text):
        part = _PART_OF_TR.match(text, position)
        if part is None or len(characters) > 1000 or (part["kind"] and part["kind"] not in _CLASSES_OF_TR):
            return None
        if part["first"] and part["first"] > part["last"]:
            return None
        if part["kind"]:
            characters += _CLASSES_OF_TR[part["kind"]]
        elif part["escaped"]:
            characters += _ESCAPES_OF_TR[part["escaped"]]
        elif part["first"]:
            characters += "".join(map(chr, range(ord(part["first"]), ord(part["last"]) + 1)))
        else:
            characters += part["plain"]
        position = part.end()
    return characters


def _cut(state: State, arguments: Sequence[str]) -> str | None:
    match = re.fullmatch(r"-d ?(.) -f ?([0-9]+)", " ".join(arguments), re.DOTALL)
    if state.input is None or match is None or has_unset(state.input):
        return None
    field = whole_number_in(match[2])
    if not field:  # cut counts fields from 1, and fails
        return None
    lines = [line.split(match[1]) for line in state.input.splitlines()]
    # a line without the delimiter is printed as it is
    return "".join(f"{parts[0] if len(parts) == 1 else ''.join(parts[field - 1 : field])}\n" for parts in lines)


def _lines(state: State, arguments: Sequence[str], first: bool) -> str | None:
    match = re.fullmatch(r"-(?:n ?)?([0-9]+)|", " ".join(arguments))
    count = None if match is None else whole_number_in(match[1] or "10")
    if state.input is None or count is None:
        return None
    lines = state.input.splitlines(keepends=True)
    return "".join(lines[:count] if first else lines[max(0, len(lines) - count) :])


def _sed(state: State, arguments: Sequence[str]) -> str | None:
    """Only `s/text/text/`, in which no character of the pattern means another one."""
    scripts = [argument for argument in arguments if re.match(r"s([/|,#@]).*\1.*\1g?$", argument, re.DOTALL)]
    others = [argument for argument in arguments if argument not in scripts and argument != "-e"]
    text = state.input if not others else state.text_of(others[0]) if len(others) == 1 else None
    if text is None or not scripts or any(other.startswith("-") for other in others):
        return None
    for script in scripts:
        parts = script[2:].split(script[1])
        if (
            len(parts) != 3
            or re.search(r"[.*\[\]^$\\+?(){}]", parts[0])
            or re.search(r"[\\&]", parts[1])
            or not parts[0]
        ):
            return None
        count = -1 if parts[2] == "g" else 1
        text = "".join(line.replace(parts[0], parts[1], count) for line in text.splitlines(keepends=True))
    return text


def _joined(state: State) -> str | None:
    return None if state.input is None else " ".join(state.input.split()) + "\n"


PRINTERS: dict[str, Callable[[State, Sequence[str]], str | None]] = {
    "echo": _echo, "printf": _printf, "dirname": _dirname, "basename": _basename, "pwd": _pwd, "realpath": _realpath,
    "readlink": _realpath, "seq": _seq, "cat": _cat, "expr": _expr, "bc": _bc, "tr": _tr, "cut": _cut, "sed": _sed,
    "head": lambda state, arguments: _lines(state, arguments, True),
    "tail": lambda state, arguments: _lines(state, arguments, False),
    "xargs": lambda state, arguments: None if arguments else _joined(state),
    "envsubst": lambda state, arguments: None if state.input is None else shown(state.input),
}  # fmt: skip
