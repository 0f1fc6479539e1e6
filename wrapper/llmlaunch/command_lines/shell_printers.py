"""Programs whose output a script's text alone decides: `echo`, `dirname`, `seq`, `cut` and their like."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence

from llmlaunch.command_lines.shell_state import State, has_unset, shown
from llmlaunch.command_lines.shell_test import CLASSES, NotComputable, compute
from llmlaunch.command_lines.shell_word_syntax import escaped
from llmlaunch.rundir.foreign_values import number_in, whole_number_in


def read_options(arguments: Sequence[str], with_value: str) -> tuple[dict[str, str], list[str]]:
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


def _operands(arguments: Sequence[str], flags: str = "") -> list[str] | None:
    """Return a command's arguments after its options; None where one is an option that is not read."""
    options, operands = read_options(arguments, "")
    return operands if options.keys() <= set(flags) else None


def _echo(state: State, arguments: Sequence[str]) -> str | None:
    operands = list(arguments)
    flags = ""
    while operands and re.fullmatch("-[neE]+", operands[0]):
        flags += operands.pop(0)
    text = " ".join(operands)
    return (escaped(text) if "e" in flags else text) + ("" if "n" in flags else "\n")


_FORMAT = re.compile(r"%(?:%|([-0+ #]{0,4})(\d{0,3})(?:\.(\d{0,3}))?([sbcdiuxXofeg]))")


def printf_text(state: State, arguments: Sequence[str]) -> str | None:
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
    if not operands or ("/" not in operands[0] and has_unset(operands[0])):
        return None
    return (posixpath.dirname(operands[0].rstrip("/") or "/") or ".") + "\n"


def _basename(state: State, arguments: Sequence[str]) -> str | None:
    operands = _operands(arguments)
    if not operands:
        return None
    name = posixpath.basename(operands[0].rstrip("/")) or "/"
    if has_unset(name):
        return None
    suffix = operands[1] if len(operands) > 1 else ""
    return (name.removesuffix(suffix) if name != suffix else name) + "\n"


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
    texts = []
    for argument in [word for word in arguments if word == "-" or not word.startswith("-")] or ["-"]:
        standard = state.input.rest() if state.input and argument == "-" else None
        text = standard if argument == "-" else state.text_of(argument)
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


def _bc(state: State, text: str, arguments: Sequence[str]) -> str | None:
    return None if arguments else _expr(state, text.split())


def _tr(state: State, text: str, arguments: Sequence[str]) -> str | None:
    deletes = list(arguments[:1]) == ["-d"]
    sets = [_set_of_tr(argument) for argument in arguments[deletes:]]
    if deletes and len(sets) == 1 and sets[0] is not None:
        return text.translate(dict.fromkeys(map(ord, sets[0])))
    if not deletes and len(sets) == 2 and sets[0] and sets[1]:
        return text.translate(dict(zip(map(ord, sets[0]), sets[1].ljust(len(sets[0]), sets[1][-1]), strict=False)))
    return None


_ESCAPES_OF_TR = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}
_PART_OF_TR = re.compile(
    r"\[:(?P<kind>[a-z]+):\]|\\(?P<escape>[nrt\\])|(?P<first>[!-Z^-~])-(?P<last>[!-Z^-~])"
    r"|(?P<plain>(?!\[[=:]|\[.\*)[^\\])",
    re.DOTALL,
)


def _set_of_tr(text: str) -> str | None:
    """Return the characters of a set of tr(1): `a-z`, `[:space:]`, `\\r`; None for a notation that is not read."""
    characters, position = "", 0
    while position < len(text):
        part = _PART_OF_TR.match(text, position)
        if part is None or len(characters) > 1000 or (part["first"] or "") > (part["last"] or ""):
            return None
        if part["first"]:
            characters += "".join(map(chr, range(ord(part["first"]), ord(part["last"]) + 1)))
        else:
            written = part["plain"] or _ESCAPES_OF_TR.get(part["escape"], "")
            if part["kind"] and part["kind"] not in CLASSES:
                return None
            ascii_text = "".join(map(chr, range(128)))
            characters += "".join(re.findall(f"[{CLASSES[part['kind']]}]", ascii_text)) if part["kind"] else written
        position = part.end()
    return characters


def _cut(state: State, text: str, arguments: Sequence[str]) -> str | None:
    options, _ = read_options(arguments, "dfc")
    by_character, delimiter = "c" in options, options.get("d", "\t")[:1]
    ranges = []
    for part in options.get("f", options.get("c", "")).split(","):
        match = re.fullmatch(r"([1-9]\d{0,5})(-?)(\d{0,6})", part)
        if match is None:  # cut counts fields from 1
            return None
        ranges.append(range(int(match[1]), int(match[3] or 10**6 if match[2] else match[1]) + 1))
    lines = []
    for line in text.splitlines():
        parts = list(line) if by_character else line.split(delimiter)
        kept = [part for place, part in enumerate(parts, start=1) if any(place in each for each in ranges)]
        whole = not by_character and len(parts) == 1  # a line without the delimiter is printed as it is
        lines.append(line if whole else ("" if by_character else delimiter).join(kept))
    return "".join(f"{line}\n" for line in lines)


def _lines(state: State, text: str, arguments: Sequence[str], first: bool) -> str | None:
    options, _ = read_options([re.sub(r"^-(\d+)$", r"-n\1", word) for word in arguments], "nc")
    count = whole_number_in(options.get("n", options.get("c", "10")))
    if count is None:
        return None
    pieces = list(text) if "c" in options else text.splitlines(keepends=True)
    return "".join(pieces[:count] if first else pieces[max(0, len(pieces) - count) :])


def _wc(state: State, text: str, arguments: Sequence[str]) -> str | None:
    counts = {"-l": text.count("\n"), "-w": len(text.split()), "-c": len(text.encode())}
    return f"{counts[arguments[0]]}\n" if len(arguments) == 1 and arguments[0] in counts else None


def _sed(state: State, text: str, arguments: Sequence[str]) -> str | None:
    """Only `s/text/text/`, in which no character of the pattern means another one."""
    for script in arguments:
        parts = script[2:].split(script[1:2] or "/")
        if script == "-e" or script[:1] != "s":
            if script == "-e" or not script.startswith("-"):
                continue  # the file
            return None
        plain = len(parts) == 3 and re.fullmatch(r"[^.*\[\]^$\\+?(){}]+", parts[0])
        if not plain or re.search(r"[\\&]", parts[1]):
            return None
        state.spend(len(text) + text.count(parts[0]) * len(parts[1]))
        count = -1 if parts[2] == "g" else 1
        text = "".join(line.replace(parts[0], parts[1], count) for line in text.splitlines(keepends=True))
    return text


# programs that change text: of their input, or of the file that is their last word
_FILTERS: dict[str, tuple[Callable[[State, str, Sequence[str]], str | None], str]] = {
    "bc": (_bc, ""), "tr": (_tr, ""), "cut": (_cut, "dfc"), "wc": (_wc, ""), "sed": (_sed, "e"),
    "head": (lambda state, text, arguments: _lines(state, text, arguments, True), "nc"),
    "tail": (lambda state, text, arguments: _lines(state, text, arguments, False), "nc"),
    "xargs": (lambda state, text, arguments: None if arguments else " ".join(text.split()) + "\n", ""),
    "envsubst": (lambda state, text, arguments: shown(text), ""),
}  # fmt: skip
_WITH_MARKS = ("sed", "envsubst", "xargs", "head", "tail")


def _filtered(name: str) -> Callable[[State, Sequence[str]], str | None]:
    change, with_value = _FILTERS[name]

    def filtered(state: State, arguments: Sequence[str]) -> str | None:
        words = list(arguments)
        operands = read_options(words, with_value)[1] if with_value else []
        files = operands[1:] if name == "sed" and "-e" not in words else operands
        text = state.text_of(files[-1]) if files else state.input.rest() if state.input else None
        if text is None or (has_unset(text) and name not in _WITH_MARKS):
            return None
        return change(state, text, words[: len(words) - len(files)])

    return filtered


PRINTERS: dict[str, Callable[[State, Sequence[str]], str | None]] = {
    "echo": _echo, "dirname": _dirname, "basename": _basename, "pwd": _pwd, "realpath": _realpath,
    "readlink": _realpath, "seq": _seq, "cat": _cat, "expr": _expr, **{name: _filtered(name) for name in _FILTERS},
}  # fmt: skip
