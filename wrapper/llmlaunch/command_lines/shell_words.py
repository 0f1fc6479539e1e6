"""Words of a script expanded as bash does it: variables, arithmetic, braces, splitting; never a program's output.

What only the run would show stays in the word as a mark (`shell_state.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import translate

from llmlaunch.command_lines.shell_arithmetic import NotComputable, compute
from llmlaunch.command_lines.shell_state import MOST_TEXT, State, Value, has_unset, unset_names
from llmlaunch.command_lines.shell_tree import Arithmetic, Block, LiteralText, Parameter, Substitution, Word
from llmlaunch.errors import UserError
from llmlaunch.rundir.foreign_values import whole_number_in

__all__ = ["Expander", "matches"]

MOST_WORDS = 10_000

_NUMBER = re.compile(r"-?[0-9]{1,19}")
_BRACES = re.compile(r"\{([^{}\s]*(?:,|\.\.)[^{}\s]*)\}")


class Expander:
    """Expands words in a shell. `output_of` returns what the commands of `$(…)` print, None where a program does."""

    def __init__(self, state: State, output_of: Callable[[State, Block], str | None]) -> None:
        self.state, self.output_of = state, output_of

    def fields(self, words: Sequence[Word]) -> list[str]:
        """Return the words that a command gets: quotes gone, variables split at blanks, arrays a word an entry."""
        fields: list[str] = []
        for word in words:
            for alternative in _brace_alternatives(word):
                fields.extend(self._fields(alternative))
                if len(fields) > MOST_WORDS:
                    raise UserError(f"{self.state.record.name}: a command has more than {MOST_WORDS} words")
        return fields

    def text(self, word: Word) -> str:
        """Return a word as one text, as an assignment has it."""
        return self.state.record.produce("".join(" ".join(self._values(part)) for part in word))

    def _fields(self, word: Word) -> list[str]:
        fields: list[str] = []
        open_field: str | None = None
        for part in word:
            values = self._values(part)
            if isinstance(part, LiteralText) or part.quoted:
                if not values and not isinstance(part, LiteralText):
                    continue  # "${empty[@]}" is no word
                pieces = values
            else:
                joined = " ".join(values)
                pieces = re.split(r"[ \t\n]+", joined)
                if joined == "":
                    continue
            for place, piece in enumerate(pieces):
                if place:
                    fields.extend([] if open_field is None else [open_field])
                    open_field = None
                if piece or isinstance(part, LiteralText) or part.quoted:
                    open_field = (open_field or "") + piece
        fields.extend([] if open_field is None else [open_field])
        for field in fields:
            self.state.record.produce(field)
        return fields

    def _values(self, part: object) -> list[str]:
        """Return the values of a part of a word: one, or one for each entry of an array."""
        if isinstance(part, LiteralText):
            return [part.text]
        if isinstance(part, Parameter):
            return self._parameter(part)
        if isinstance(part, Arithmetic):
            return [self.arithmetic(part.expression, part.line)]
        assert isinstance(part, Substitution)
        return [self.substitution(part)]

    def substitution(self, part: Substitution, name: str | None = None) -> str:
        """Return what `$(…)` prints; where that is unknown, a mark named like the variable that takes it."""
        output = self.output_of(self.state, part.body)
        if output is not None:
            return output.rstrip("\n")
        return self.state.unset(name or f"output_of_line_{part.line}", part.line, computed=True)

    def arithmetic(self, expression: Word, line: int) -> str:
        """Return the number of `$((…))`, or a mark where it depends on what is not known."""
        text = self.text(expression)

        def value(name: str) -> str:
            match = re.fullmatch(r"(\w+)\[(\w+)\]", name)
            index = None if match is None else (LiteralText(match[2]),)
            values = self._parameter(Parameter(match[1] if match else name, line, index=index))
            if any(map(has_unset, values)):
                unknown.extend(values)
                raise NotComputable
            return " ".join(values)

        unknown: list[str] = []
        try:
            if has_unset(text):
                unknown.append(text)
                raise NotComputable
            return str(compute(text, value, self.state.assign))
        except NotComputable:
            # the first variable that is missing: with a value for it, the number is computed
            names = [name for text in unknown for name in unset_names(text)] or [f"number_of_line_{line}"]
            return self.state.unset(names[0], line, computed=not unknown)

    # parameters

    def _parameter(self, part: Parameter) -> list[str]:
        name = part.name
        if part.prefix == "!":
            name = self._scalar(self._entries(part.name, None, part.line))
            if not re.fullmatch(r"\w+", name):
                return [self.state.unset(part.name, part.line)]
        every = part.index in ((LiteralText("@"),), (LiteralText("*"),)) or name in ("@", "*")
        star = part.index == (LiteralText("*"),) or name == "*"
        known = self._known(name, part)
        if part.prefix == "#":
            entries = known if known is not None else self._missing(name, part.line)
            text = self._scalar(entries)
            return [str(len(entries) if every else len(text))] if every or not has_unset(text) else [text]
        if part.operator.lstrip(":") in ("-", "=", "?", "+") and part.operator:
            return self._defaulted(part, name, known)
        entries = known if known is not None else self._missing(name, part.line)
        if part.operator:
            entries = self._operated(part, entries, every)
        if every:
            return [" ".join(entries)] if star and part.quoted else entries
        return [self._scalar(entries)]

    def _known(self, name: str, part: Parameter) -> list[str] | None:
        """Return the entries of a variable, or None where it is not set."""
        state = self.state
        if name in ("@", "*"):
            if not state.has_arguments:
                state.note(part.line, "the script's own arguments are passed on; none were given")
            return list(state.arguments)
        if name == "#":
            return [str(len(state.arguments))] if state.has_arguments else None
        if name == "0" or name == "BASH_SOURCE":
            return [state.path]
        position = whole_number_in(name)
        if position:
            return state.arguments[position - 1 : position] or ([""] if state.has_arguments else None)
        if name in ("?", "PIPESTATUS"):
            return ["0"]
        if name == "PWD":
            return [state.folder]
        value = state.variables.get(name)
        return None if value is None else self._indexed(value, part.index)

    def _entries(self, name: str, index: Word | None, line: int) -> list[str]:
        entries = self._known(name, Parameter(name, line, index=index))
        return self._missing(name, line) if entries is None else entries

    def _indexed(self, value: Value, index: Word | None) -> list[str] | None:
        if isinstance(value, str):
            return [value] if index in (None, (LiteralText("0"),), (LiteralText("@"),), (LiteralText("*"),)) else None
        entries = list(value.values()) if isinstance(value, dict) else value
        if index in ((LiteralText("@"),), (LiteralText("*"),)):
            return list(entries)
        key = "0" if index is None else self.text(index)
        if has_unset(key):
            return [key]
        if isinstance(value, dict):
            return [value[key]] if key in value else None
        number = self.arithmetic((LiteralText(key),), 0)
        place = int(number) if _NUMBER.fullmatch(number) else len(value)
        return [value[place]] if -len(value) <= place < len(value) else None

    def _missing(self, name: str, line: int) -> list[str]:
        if not re.fullmatch(r"\w+", name):
            name = {"#": "number_of_arguments", "$": "process_id", "!": "process_id"}.get(name, "shell_options")
        return [self.state.unset(name, line)]

    def _scalar(self, entries: Sequence[str]) -> str:
        return entries[0] if entries else ""

    def _defaulted(self, part: Parameter, name: str, known: list[str] | None) -> list[str]:
        """Apply `-`, `=`, `?` or `+`, with `:` also to a variable that is empty."""
        operator = part.operator.lstrip(":")
        given = self.state.given.get(name)
        if known is None and given is not None:
            known = [given]
        is_set = known is not None
        if known is not None and part.operator.startswith(":"):
            is_set = any(not self.state.is_null(entry) for entry in known)
        elif known is not None and known and all(has_unset(entry) and self.state.is_null(entry) for entry in known):
            is_set = False
        if operator == "+":
            return [self.text(part.argument)] if is_set else []
        if is_set and known is not None:
            return known
        if operator == "?":
            return self._missing(name, part.line)
        value = self.text(part.argument)
        if operator == "=":
            self.state.assign(name, value)
        return [value]

    def _operated(self, part: Parameter, entries: list[str], every: bool) -> list[str]:
        """Apply cutting, replacing, slices and cases; a text with an unknown part stays as it is."""
        operator = part.operator
        if operator == ":":
            return self._sliced(part, entries, every)
        argument = self.text(part.argument)
        if len(argument) > 200 or any(len(entry) > 4000 for entry in entries):
            return [self.state.unset(part.name, part.line, computed=True)]
        return [entry if has_unset(entry + argument) else _changed(entry, operator, argument) for entry in entries]

    def _sliced(self, part: Parameter, entries: list[str], every: bool) -> list[str]:
        numbers = [self.arithmetic((LiteralText(text),), part.line) for text in self.text(part.argument).split(":")]
        sequence: Sequence[str] = entries if every else self._scalar(entries)
        if not all(map(_NUMBER.fullmatch, numbers)) or (has_unset("".join(entries)) and not every):
            return [self.state.unset(part.name, part.line, computed=True)]
        start = int(numbers[0])
        if part.name in ("@", "*"):
            sequence = [self.state.path, *entries]
        start = start + len(sequence) if start < 0 else start
        stop = len(sequence)
        if len(numbers) > 1:
            length = int(numbers[1])
            stop = start + length if length >= 0 else len(sequence) + length
        cut = sequence[max(start, 0) : stop]
        return [cut] if isinstance(cut, str) else list(cut)


def matches(pattern: str, text: str) -> bool:
    """Return whether a text has the form of a pattern with `*`, `?` and `[…]`."""
    if len(pattern) > 200 or pattern.count("*") > 8 or len(text) > MOST_TEXT // 16:
        return pattern == text
    return re.fullmatch(translate(pattern), text) is not None


def _changed(text: str, operator: str, argument: str) -> str:
    if operator in ("^", "^^", ",", ",,"):
        change = str.upper if operator[0] == "^" else str.lower
        return change(text) if len(operator) == 2 else change(text[:1]) + text[1:]
    if operator[0] in "%#":
        places = range(len(text) + 1)
        ordered = places if operator in ("#", "%%") else reversed(places)
        front = operator[0] == "#"
        for place in ordered:
            if matches(argument, text[:place] if front else text[place:]):
                return text[place:] if front else text[:place]
        return text
    if operator[0] == "/":
        old, _, new = argument.partition("/")
        if any(character in old for character in "*?["):
            return re.sub(
                translate(old).removesuffix(r"\Z").removesuffix(r"\z"), lambda _: new, text, count=int(operator == "/")
            )
        if operator == "/#":
            return new + text[len(old) :] if text.startswith(old) else text
        if operator == "/%":
            return text[: len(text) - len(old)] + new if old and text.endswith(old) else text
        return text.replace(old, new, -1 if operator == "//" else 1) if old else text
    return text


def _brace_alternatives(word: Word) -> list[Word]:
    """Return the words that `{a,b}` and `{1..4}` make of one."""
    done: list[Word] = []
    waiting = [word]
    while waiting and len(done) + len(waiting) <= MOST_WORDS:
        current = waiting.pop(0)
        for place, part in enumerate(current):
            match = _BRACES.search(part.text) if isinstance(part, LiteralText) and not part.quoted else None
            choices = [] if match is None else _choices(match[1])
            if isinstance(part, LiteralText) and match is not None and choices:
                before, after = part.text[: match.start()], part.text[match.end() :]
                waiting[:0] = [
                    (*current[:place], LiteralText(before + choice + after), *current[place + 1 :])
                    for choice in choices
                ]
                break
        else:
            done.append(tuple(part for part in current if part != LiteralText("")) or current)
    return done


def _choices(inside: str) -> list[str]:
    numbers = re.fullmatch(r"(-?\d{1,6})\.\.(-?\d{1,6})", inside)
    if numbers is None:
        return inside.split(",") if "," in inside else []
    first, last = int(numbers[1]), int(numbers[2])
    step = 1 if last >= first else -1
    if abs(last - first) >= MOST_WORDS:
        return []
    width = max(len(numbers[1]), len(numbers[2])) if re.search(r"(^|\D)0\d", inside) else 0
    return [f"{number:0{width}d}" for number in range(first, last + step, step)]
