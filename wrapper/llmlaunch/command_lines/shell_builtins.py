"""Commands whose outcome a script's text alone decides: `cd`, `echo`, `dirname`, `seq` and their like."""

from __future__ import annotations

import posixpath
import re
import string
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

from llmlaunch.command_lines import shell_tree as tree
from llmlaunch.command_lines.shell_arithmetic import NotComputable, compute
from llmlaunch.command_lines.shell_state import LONGEST_PATH, Array, State, has_unset, reason, shown
from llmlaunch.command_lines.shell_test import test_outcome
from llmlaunch.command_lines.shell_word_syntax import escaped
from llmlaunch.command_lines.shell_words import Expander
from llmlaunch.rundir.foreign_values import number_in, whole_number_in

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

    def start(self, fields: Sequence[str], line: int) -> None: ...


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
    text = state.text_of(arguments[0]) if arguments else None
    if text is None:
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
            state.remove(name)
            state.unexport(name)
    return True


def _let(shell: Shell, arguments: list[str], line: int) -> bool | None:
    numbers = [shell.words.arithmetic((tree.LiteralText(argument),), line, True) for argument in arguments]
    return None if not numbers or has_unset(numbers[-1]) else numbers[-1] != "0"


def _options(arguments: Sequence[str], with_value: str) -> tuple[dict[str, str], list[str]]:
    """Return options of one letter and the operands, as getopt reads them."""
    options: dict[str, str] = {}
    operands = list(arguments)
    while operands and operands[0].startswith("-") and len(operands[0]) > 1:
        word = operands.pop(0)
        if word == "--":
            break
        for place, letter in enumerate(word[1:], start=2):
            options[letter] = ""
            if letter in with_value:
                options[letter] = word[place:] or (operands.pop(0) if operands else "")
                break
    return options, operands


def _read_variables(shell: Shell, arguments: list[str], line: int) -> bool | None:
    state = shell.state
    options, names = _options(arguments, "adinNptu")
    names = [name for name in names if name.isidentifier()] or ([] if "a" in options else ["REPLY"])
    if state.input is None or "u" in options:
        for name in names or [options["a"]]:
            state.assign(name, state.unset(name, line, computed=True))
        return None
    text, is_complete = state.input.line(options["d"][:1] if "d" in options else "\n")
    if "r" not in options:
        text = re.sub(r"\\(.)", r"\1", text)
    if "a" in options:
        state.assign(options["a"], Array(shell.words.separated(text)))
        return is_complete
    values = shell.words.separated(text, len(names)) if text else []
    for name, value in zip(names, [*values, *[""] * len(names)], strict=False):
        state.assign(name, value)
    return is_complete


def _mapfile(shell: Shell, arguments: list[str], line: int) -> bool | None:
    options, names = _options(arguments, "dnOsuCc")
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
        return shell.print_(_printf(shell.state, arguments))
    text = _printf(shell.state, arguments[2:])
    name = arguments[1]
    shell.state.assign(name, shell.state.unset(name, line, computed=True) if text is None else text)
    return True


def _exit(shell: Shell, arguments: list[str], line: int) -> bool | None:
    state = shell.state
    if not state.is_subshell:
        state.ends(shown(" ".join(["exit", *arguments[:1]])), line, reason(chain(*state.record.reasons)))
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


BUILTINS: dict[str, Builtin] = {
    "cd": _cd, "pushd": _pushd, "popd": _popd, "source": _source, ".": _source, "eval": _eval, "set": _set,
    "shift": _shift, "unset": _unset, "let": _let, "read": _read_variables, "mapfile": _mapfile,
    "readarray": _mapfile, "getopts": _getopts, "test": _test, "[": _test, "tee": _tee, "printf": _printf_into,
    "false": lambda shell, arguments, line: False, "exit": _exit, "return": _return, "break": _leaves_loop("break"),
    "continue": _leaves_loop("continue"),
    **dict.fromkeys((":", "true", "wait", "trap", "shopt", "alias", "unalias", "disown", "jobs"), _succeeds),
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
    flags = ""
    while operands and re.fullmatch("-[neE]+", operands[0]):
        flags += operands.pop(0)
    text = " ".join(operands)
    return (escaped(text) if "e" in flags else text) + ("" if "n" in flags else "\n")


_FORMAT = re.compile(r"%(?:%|([-0+ #]{0,4})(\d{0,3})(?:\.(\d{0,3}))?([sbcdiuxXofeg]))")


def _printf(state: State, arguments: Sequence[str]) -> str | None:
    operands = _operands(arguments)
    template = escaped(operands[0]) if operands else ""
    if not operands or _FORMAT.sub("", template).count("%"):
        return None
    values = operands[1:]
    printed: list[str] = []

    def value(match: re.Match[str]) -> str:
        flags, width, precision, kind = match.groups()
        if kind is None:
            return "%"
        text = values.pop(0) if values else "" if kind in "sbc" else "0"
        if kind in "sbc" or has_unset(text):
            text = escaped(text) if kind == "b" else text[:1] if kind == "c" else text
            text = text[: int(precision)] if precision else text
            return text.ljust(int(width or 0)) if "-" in flags else text.rjust(int(width or 0))
        point = "" if precision is None else f".{precision or 0}"
        number = number_in(text) or 0 if kind in "feg" else compute(text, lambda name: "", lambda name, value: None)
        return f"%{flags}{width}{point}{kind}" % number

    while True:
        before = len(values)
        state.spend(len(template))
        try:
            printed.append(_FORMAT.sub(value, template))
        except NotComputable:
            return None
        if not values or len(values) == before:
            return "".join(printed)


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


def _stdin(state: State) -> str | None:
    return None if state.input is None else state.input.rest()


def _cat(state: State, arguments: Sequence[str]) -> str | None:
    texts = []
    for argument in [word for word in arguments if word == "-" or not word.startswith("-")] or ["-"]:
        text = _stdin(state) if argument == "-" else state.text_of(argument)
        if text is None:
            return None
        state.spend(len(text))
        texts.append(text)
    return "".join(texts)


def _expr(state: State, arguments: Sequence[str]) -> str | None:
    if not arguments or any(has_unset(argument) for argument in arguments):
        return None
    try:
        return f"{compute(' '.join(arguments), lambda name: 'x y', lambda name, value: None)}\n"
    except NotComputable:
        return None


def _bc(state: State, arguments: Sequence[str]) -> str | None:
    text = _stdin(state)
    return None if text is None or arguments else _expr(state, text.split())


def _tr(state: State, arguments: Sequence[str]) -> str | None:
    text = _stdin(state)
    if text is None or has_unset(text):
        return None
    deletes = list(arguments[:1]) == ["-d"]
    sets = [_set_of_tr(argument) for argument in arguments[deletes:]]
    if deletes and len(sets) == 1 and sets[0] is not None:
        return text.translate(dict.fromkeys(map(ord, sets[0])))
    if not deletes and len(sets) == 2 and sets[0] and sets[1]:
        return text.translate(dict(zip(map(ord, sets[0]), sets[1].ljust(len(sets[0]), sets[1][-1]), strict=False)))
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
    options, operands = _options(arguments, "dfc")
    text = _stdin(state) if not operands else state.text_of(operands[0])
    ranges = [
        re.fullmatch(r"(\d{0,6})(-?)(\d{0,6})", part) for part in options.get("f", options.get("c", "")).split(",")
    ]
    if (
        text is None
        or has_unset(text)
        or not ranges
        or any(each is None or each[1] == "0" or not each[0] for each in ranges)
    ):
        return None
    delimiter = options.get("d", "\t")[:1]

    def chosen(place: int) -> bool:
        return any(
            int(each[1] or 1) <= place <= (int(each[3] or place) if each[2] else int(each[1] or 0))
            for each in ranges
            if each is not None
        )

    lines = []
    for line in text.splitlines():
        parts = list(line) if "c" in options else line.split(delimiter)
        kept = [part for place, part in enumerate(parts, start=1) if chosen(place)]
        # a line without the delimiter is printed as it is
        lines.append(line if "f" in options and len(parts) == 1 else ("" if "c" in options else delimiter).join(kept))
    return "".join(f"{line}\n" for line in lines)


def _lines(state: State, arguments: Sequence[str], first: bool) -> str | None:
    options, operands = _options([re.sub(r"^-(\d+)$", r"-n\1", word) for word in arguments], "nc")
    count = whole_number_in(options.get("n", options.get("c", "10")))
    text = state.text_of(operands[0]) if operands else _stdin(state)
    if text is None or count is None:
        return None
    pieces = list(text) if "c" in options else text.splitlines(keepends=True)
    return "".join(pieces[:count] if first else pieces[max(0, len(pieces) - count) :])


def _wc(state: State, arguments: Sequence[str]) -> str | None:
    text = _stdin(state) if len(arguments) == 1 else None
    if text is None or has_unset(text) or arguments[0] not in ("-l", "-w", "-c"):
        return None
    counts = {"-l": text.count("\n"), "-w": len(text.split()), "-c": len(text.encode())}
    return f"{counts[arguments[0]]}\n"


def _sed(state: State, arguments: Sequence[str]) -> str | None:
    """Only `s/text/text/`, in which no character of the pattern means another one."""
    scripts = [argument for argument in arguments if re.match(r"s([/|,#@]).*\1.*\1g?$", argument, re.DOTALL)]
    others = [argument for argument in arguments if argument not in scripts and argument != "-e"]
    text = _stdin(state) if not others else state.text_of(others[0]) if len(others) == 1 else None
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
        state.spend(len(text) + text.count(parts[0]) * len(parts[1]))
        text = "".join(line.replace(parts[0], parts[1], count) for line in text.splitlines(keepends=True))
    return text


def _joined(state: State) -> str | None:
    text = _stdin(state)
    return None if text is None else " ".join(text.split()) + "\n"


def _substituted(state: State, arguments: Sequence[str]) -> str | None:
    text = _stdin(state)
    return None if text is None else shown(text)


PRINTERS: dict[str, Callable[[State, Sequence[str]], str | None]] = {
    "echo": _echo, "dirname": _dirname, "basename": _basename, "pwd": _pwd, "realpath": _realpath,
    "readlink": _realpath, "seq": _seq, "cat": _cat, "expr": _expr, "bc": _bc, "tr": _tr, "cut": _cut, "sed": _sed,
    "head": lambda state, arguments: _lines(state, arguments, True),
    "tail": lambda state, arguments: _lines(state, arguments, False),
    "xargs": lambda state, arguments: None if arguments else _joined(state),
    "envsubst": _substituted, "wc": _wc,
}  # fmt: skip
