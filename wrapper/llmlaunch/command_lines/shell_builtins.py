"""Commands of the shell itself: `cd`, `set`, `read`, `source` and their like."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

from llmlaunch.command_lines import shell_tree as tree
from llmlaunch.command_lines.shell_printers import printf_text, read_options
from llmlaunch.command_lines.shell_state import LONGEST_PATH, Array, State, has_unset, reason, shown
from llmlaunch.command_lines.shell_test import test_outcome
from llmlaunch.command_lines.shell_words import Expander
from llmlaunch.rundir.foreign_values import whole_number_in


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

    def start(self, fields: Sequence[str], line: int) -> None: ...


# files that prepare a shell and start nothing: what they set depends on the machine
PREPARES = re.compile(
    r"(?:/bin/activate|(?:conda|mamba|setvars|modules?|lmod)\.sh|/\.(?:bashrc|(?:bash_)?profile|bash_login)|/init/bash)$"
    r"|^/etc/"
)
Builtin = Callable[[Shell, list[str], int], bool | None]


def _cd(shell: Shell, arguments: list[str], line: int) -> bool | None:
    state = shell.state
    places = [argument for argument in arguments if argument == "-" or not argument.startswith("-")]
    place = places[0] if places else str(state.variables.get("HOME") or state.unset("HOME", line))
    folder = str(state.variables.get("OLDPWD", state.folder)) if place == "-" else state.resolved(place)
    if len(folder) > LONGEST_PATH:
        return False
    state.assign("OLDPWD", state.folder)
    state.folder = folder
    return True


def _pushd(shell: Shell, arguments: list[str], line: int) -> bool | None:
    shell.state.folders.append(shell.state.folder)
    return _cd(shell, arguments or ["-"], line)


def _popd(shell: Shell, arguments: list[str], line: int) -> bool | None:
    if shell.state.folders:
        shell.state.folder = shell.state.folders.pop()
    return True


def _source(shell: Shell, arguments: list[str], line: int) -> bool | None:
    state = shell.state
    prepares = bool(arguments) and PREPARES.search(arguments[0]) is not None
    text = state.text_of(arguments[0]) if arguments and not prepares else None
    if text is None:
        if not prepares:
            state.note(line, f"{shown(' '.join(arguments[:1]))} is not here and was not read")
        shell.start(["source", *arguments], line)
        return None
    before = state.script, state.path, state.arguments, state.has_arguments, state.is_sourced
    state.script, state.path, state.is_sourced = Path(arguments[0]).name, state.resolved(arguments[0]), True
    if arguments[1:]:
        state.arguments, state.has_arguments = arguments[1:], True
    try:
        shell.read(text)
    except Left as left:
        if left.command != "return":
            raise
    finally:
        state.script, state.path, _, _, state.is_sourced = before
        if arguments[1:]:
            state.arguments, state.has_arguments = before[2:4]
    return True


def _eval(shell: Shell, arguments: list[str], line: int) -> bool | None:
    shell.read(shown(" ".join(arguments)), line)
    return None


def _set(shell: Shell, arguments: list[str], line: int) -> bool | None:
    words = list(arguments)
    while words and re.match("[-+].", words[0]):
        word = words.pop(0)
        if word == "--":
            shell.state.arguments, shell.state.has_arguments = words, True
            return True
        option = words.pop(0) if "o" in word and words else ""
        if "u" in word or option == "nounset":
            shell.state.stops_at_unset = word[0] == "-"
        if "a" in word or option == "allexport":
            shell.state.exports_all = word[0] == "-"
    if words:
        shell.state.arguments, shell.state.has_arguments = words, True
    return True


def _shift(shell: Shell, arguments: list[str], line: int) -> bool | None:
    count = whole_number_in(arguments[0]) if arguments else 1
    if count is None or count > len(shell.state.arguments):  # bash shifts nothing
        return False
    del shell.state.arguments[:count]
    return True


def _unset(shell: Shell, arguments: list[str], line: int) -> bool | None:
    state = shell.state
    for word in arguments:
        name, bracket, index = word.partition("[")
        array = state.variables.get(state.target(name))
        if "-f" in arguments:
            state.functions.pop(word, None)
        elif bracket and isinstance(array, Array):
            array.pop(shell.words.index(name, (tree.LiteralText(index.removesuffix("]")),)), None)
        else:
            if name.isidentifier() and name not in state.variables:
                shell.start(["unset", name], line)  # what the job inherits
            state.remove(name)
            state.unexport(name)
    return True


def _trap(shell: Shell, arguments: list[str], line: int) -> bool | None:
    shell.start(["trap", *arguments], line)  # nothing of it is run here
    return True


def _let(shell: Shell, arguments: list[str], line: int) -> bool | None:
    numbers = [shell.words.arithmetic((tree.LiteralText(argument),), line, True) for argument in arguments]
    return None if not numbers or has_unset(numbers[-1]) else numbers[-1] != "0"


def _read_variables(shell: Shell, arguments: list[str], line: int) -> bool | None:
    state = shell.state
    options, names = read_options(arguments, "adinNptu")
    names = [name for name in names if name.isidentifier()] or ([] if "a" in options else ["REPLY"])
    if state.input is None or "u" in options:
        for name in names or [options["a"]]:
            state.assign(name, state.unset(name, line, computed=True))
        return None
    text, is_complete = state.input.line(options["d"][:1] if "d" in options else "\n")
    if "r" not in options:
        text = re.sub(r"\\(.?)", r"\1", text)
    if "a" in options:
        state.assign(options["a"], Array(shell.words.separated(text)))
        return is_complete
    values = shell.words.separated(text, len(names)) if text else []
    for name, value in zip(names, [*values, *[""] * len(names)], strict=False):
        state.assign(name, value)
    return is_complete


def _mapfile(shell: Shell, arguments: list[str], line: int) -> bool | None:
    options, names = read_options(arguments, "dnOsuCc")
    name, end = (names or ["MAPFILE"])[0], options.get("d", "\n")[:1] or "\n"
    if shell.state.input is None:
        shell.state.assign(name, shell.state.unset(name, line, computed=True))
        return None
    lines = shell.state.input.rest().split(end)
    lines = lines if lines[-1] else lines[:-1]
    shell.state.assign(name, Array(text if "t" in options else text + end for text in lines))
    return True


def _getopts(shell: Shell, arguments: list[str], line: int) -> bool | None:
    """Read one option of the arguments; where in them is in OPTIND, where in a word in the shell's own state."""
    state = shell.state
    forms, name = (*arguments, "", "")[:2]
    words = arguments[2:] or state.arguments
    index = whole_number_in(str(state.variables.get("OPTIND", "1"))) or 1
    word = words[index - 1] if index <= len(words) else ""
    if not word.startswith("-") or word in ("-", "--"):
        if not words and not state.has_arguments:
            state.assume("#", line)
        state.assign(name, "?")
        return False
    letter, rest = word[1 + state.letters_read], word[2 + state.letters_read :]
    state.letters_read = state.letters_read + 1 if rest else 0
    index += not rest
    value = ""
    if forms.partition(letter)[2][:1] == ":" and letter != ":":
        value = rest or (words[index - 1] if index <= len(words) else "")
        index, state.letters_read = index + 1, 0
    state.assign("OPTARG", value)
    state.assign("OPTIND", str(index))
    state.assign(name, letter if letter in forms else "?")
    return True


def _test(shell: Shell, arguments: list[str], line: int) -> bool | None:
    words = arguments[:-1] if arguments[-1:] == ["]"] else arguments
    return test_outcome(shell.state, words, line, patterns=False)


def _tee(shell: Shell, arguments: list[str], line: int) -> bool | None:
    text = None if shell.state.input is None else shell.state.input.rest()
    for argument in arguments if text is not None else ():
        if not argument.startswith("-"):
            shell.state.write(argument, text or "", "-a" in arguments)
    return shell.print_(text)


def _printf_into(shell: Shell, arguments: list[str], line: int) -> bool | None:
    if arguments[:1] != ["-v"] or len(arguments) < 3:
        return shell.print_(printf_text(shell.state, arguments))
    text = printf_text(shell.state, arguments[2:])
    name = arguments[1]
    shell.state.assign(name, shell.state.unset(name, line, computed=True) if text is None else text)
    return True


def _exit(shell: Shell, arguments: list[str], line: int) -> bool | None:
    state = shell.state
    if not state.is_subshell:
        # a script that read no arguments may complain of what they would have set
        why = reason(chain(*state.record.reasons), state.variables) or reason({"#"} & state.record.assumed.keys())
        state.ends(shown(" ".join(["exit", *arguments[:1]])), line, why)
    raise Left("exit")


def _return(shell: Shell, arguments: list[str], line: int) -> bool | None:
    if not shell.state.calls and not shell.state.is_sourced:
        return False  # bash complains and goes on
    status = whole_number_in(arguments[0]) if arguments else None
    raise Left("return", -1 if status is None else status)


def _leaves_loop(command: str) -> Builtin:
    """Return the builtin that leaves a loop or a round of it."""

    def leave(shell: Shell, arguments: list[str], line: int) -> bool | None:
        if shell.state.loops:
            raise Left(command, whole_number_in(arguments[0]) or 1 if arguments else 1)
        return True

    return leave


def _succeeds(shell: Shell, arguments: list[str], line: int) -> bool | None:
    return True


def declare(shell: Shell, node: tree.Simple, name: str, arguments: list[str]) -> bool | None:
    """Run `declare`, `local`, `export` or another of their kind; `arguments` are its words that are no assignments."""
    state = shell.state
    flags = "".join(word[1:] for word in arguments if word.startswith("-"))
    plain_words = [word for word in arguments if not word.startswith(("-", "+"))]
    if any(flag in flags for flag in "fFp"):
        return True
    local = state.hide if state.calls and name in ("local", "declare", "typeset") and "g" not in flags else None
    names = [word.partition("=")[0] for word in plain_words]
    for word in node.words:
        if not isinstance(word, tree.Assignment):
            continue
        names.append(word.name)
        if "n" in flags and name != "export":
            text = shell.words.text(word.value)  # type: ignore[arg-type]
            if local is not None:
                local(word.name)
            state.references[word.name] = text
        else:
            shell.words.assign(word, node.line, "A" in flags, local)
        if "i" in flags:
            number = tree.LiteralText(str(state.variables.get(word.name, "")))
            state.assign(word.name, shell.words.arithmetic((number,), node.line))
    for text in plain_words:
        key, equals, value = text.partition("=")
        if local is not None:
            local(key)
        if equals or (local is not None and not (set(flags) & set("aA"))):
            state.assign(key, value)
        elif set(flags) & set("aA") and not isinstance(state.variables.get(key), Array):
            state.assign(key, Array(keyed="A" in flags))
    if name == "export" or "x" in flags:
        for key in names:
            (state.unexport if "n" in flags else state.export)(key)
    return True


BUILTINS: dict[str, Builtin] = {
    "cd": _cd, "pushd": _pushd, "popd": _popd, "source": _source, ".": _source, "eval": _eval, "set": _set,
    "shift": _shift, "unset": _unset, "let": _let, "trap": _trap, "read": _read_variables, "mapfile": _mapfile,
    "readarray": _mapfile, "getopts": _getopts, "test": _test, "[": _test, "tee": _tee, "printf": _printf_into,
    "false": lambda shell, arguments, line: False, "exit": _exit, "return": _return, "break": _leaves_loop("break"),
    "continue": _leaves_loop("continue"),
    **dict.fromkeys((":", "true", "wait", "shopt", "alias", "unalias", "disown", "jobs"), _succeeds),
}  # fmt: skip
