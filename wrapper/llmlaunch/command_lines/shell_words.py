"""Words of a script expanded as bash does it: variables, arithmetic, braces, splitting; never a program's output.

What only the run would show stays in the word as a mark (`shell_state.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from llmlaunch.command_lines import shell_tree as tree
from llmlaunch.command_lines.shell_state import Array, State, has_unset, reason, unset_names
from llmlaunch.command_lines.shell_test import NotComputable, ShellPattern, compute
from llmlaunch.rundir.foreign_values import whole_number_in

_NUMBER = re.compile(r"-?[0-9]{1,19}")
_BRACES = re.compile(r"\{([^{}\s]*(?:,|\.\.)[^{}\s]*)\}")
_RANGE = re.compile(r"(-?\d{1,9}|[a-zA-Z])\.\.(-?\d{1,9}|[a-zA-Z])(?:\.\.(-?\d{1,9}))?")
_SPECIAL = {"$": "process_id", "!": "process_id", "-": "shell_options", "_": "last_argument"}
_EVERY = ((tree.LiteralText("@"),), (tree.LiteralText("*"),))


class Expander:
    """Expands words in a shell. `output_of` returns what the commands of `$(…)` print, None where a program does."""

    def __init__(self, state: State, output_of: Callable[[State, tree.Statements], str | None]) -> None:
        self.state, self.output_of = state, output_of

    def fields(self, words: Sequence[tree.Word]) -> list[str]:
        """Return the words that a command gets: quotes gone, variables split at blanks, arrays a word an entry."""
        fields: list[str] = []
        for word in words:
            for alternative in self._brace_alternatives(word):
                more = self._fields(alternative)
                self.state.record.budget.spend("words", len(more))
                fields += more
        return fields

    def text(self, word: tree.Word) -> str:
        """Return a word as one text, as an assignment has it."""
        return self._joined(" ".join(self._values(part)) for part in self._plain_parts(word))

    def pattern(self, word: tree.Word) -> str:
        """Return a word as a pattern, in which a backslash stands before what was quoted."""
        return self._joined(
            re.sub(r"([^\w\s])", r"\\\1", text, flags=re.ASCII) if part.quoted and not has_unset(text) else text
            for part in self._plain_parts(word)
            for text in (" ".join(self._values(part)),)
        )

    def _joined(self, texts: Iterator[str]) -> str:
        parts = []
        for text in texts:
            self.state.spend(len(text))
            parts.append(text)
        return "".join(parts)

    def _fields(self, word: tree.Word) -> list[str]:
        fields: list[str] = []
        open_field: str | None = None
        for part in self._plain_parts(word):
            values = self._values(part)
            self.state.spend(sum(map(len, values)))
            keeps_empty = part.quoted or (isinstance(part, tree.LiteralText) and not part.splits)
            if keeps_empty:
                pieces = values  # "${empty[@]}" is no word
            elif "".join(values) == "":
                continue
            else:
                pieces, keeps_empty = self._split(" ".join(values))
            for place, piece in enumerate(pieces):
                if place:
                    fields.extend([] if open_field is None else [open_field])
                    open_field = None
                if piece or keeps_empty:
                    open_field = (open_field or "") + piece
        fields.extend([] if open_field is None else [open_field])
        return fields

    def _separators(self) -> tuple[str, str]:
        """Return the blanks of IFS, and the regular expression of what separates two fields."""
        characters = self.state.variables.get("IFS", " \t\n")
        blanks = "".join(character for character in str(characters) if character in " \t\n") or "\0"
        others = "".join(character for character in str(characters) if character not in " \t\n")
        around = f"[{blanks}]*[{re.escape(others)}][{blanks}]*|" if others else ""
        return blanks, f"{around}[{blanks}]+"

    def _split(self, text: str) -> tuple[list[str], bool]:
        """Split at the characters of IFS; return whether empty pieces are words, too."""
        blanks, separator = self._separators()
        if "|" not in separator:
            return re.split(separator, text), False
        pieces = re.split(separator, text.strip(blanks))
        return pieces[:-1] if len(pieces) > 1 and not pieces[-1] else pieces, True

    def separated(self, text: str, most: int | None = None) -> list[str]:
        """Return the fields of a line as `read` splits it; the last of `most` is the rest of the line."""
        blanks, separator = self._separators()
        rest = text.strip(blanks)
        fields = re.split(separator, rest, maxsplit=most - 1 if most else 0) if rest and most != 1 else [rest]
        return fields[:-1] if most is None and not fields[-1] else fields

    def _plain_parts(self, word: tree.Word) -> Iterator[tree.Part]:
        """Yield the parts of a word in which `${X:-default}` and its like are replaced by what they choose."""
        for place, part in enumerate(word):
            if isinstance(part, tree.Parameter) and part.operator.lstrip(":") in ("-", "=", "?", "+") and part.operator:
                chosen = self._chosen(part)
                for each in self._plain_parts(chosen):
                    yield replace(each, splits=not each.quoted) if isinstance(each, tree.LiteralText) else each
                if part.quoted and not chosen and part.index not in _EVERY:
                    yield tree.LiteralText("", True)
            elif not place and isinstance(part, tree.LiteralText) and not part.quoted and re.match("~(/|$)", part.text):
                yield tree.LiteralText(str(self.state.variables.get("HOME", "~")), True)
                yield tree.LiteralText(part.text[1:], True)
            else:
                yield part

    def _chosen(self, part: tree.Parameter) -> tree.Word:
        """Return the variable, or what `-`, `=`, `?` or `+` puts in its place, with `:` also where it is empty."""
        state, operator = self.state, part.operator.lstrip(":")
        if part.prefix == "!":
            part, _ = self._indirect(part)
        known = self._known(part)
        is_set = known is not None and not (part.index in _EVERY and not known)
        if known is not None and part.operator.startswith(":"):
            is_set = any(not state.is_null(entry) for entry in known)
        if operator == "+":
            return part.argument if is_set else ()
        variable = (replace(part, operator="", argument=()),)
        if is_set:
            return variable
        if operator == "?":
            message = self.text(part.argument) or "it has to be set"
            state.ends(f"${{{part.name}{part.operator}{message}}}", part.line, reason((part.name,)), goes_on=True)
            return (tree.LiteralText(self._missing(part.name, part.line), part.quoted),)
        if operator == "=":
            state.assign(part.name, self.text(part.argument))
            return variable
        if not part.argument:
            self._assume_empty(part.name)
        return part.argument

    def _assume_empty(self, name: str) -> None:
        """Note that a variable is empty: a condition on it may complain of a value that a person is to fill in."""
        if name.isidentifier():
            self.state.record.assumed[name] = None

    def _values(self, part: tree.Part) -> list[str]:
        """Return the values of a part of a word: one, or one for each entry of an array."""
        if isinstance(part, tree.LiteralText):
            return [part.text]
        if isinstance(part, tree.Parameter):
            return self._parameter(part)
        if isinstance(part, tree.Arithmetic):
            return [self.arithmetic(part.expression, part.line)]
        if part.file:
            place = f"/dev/fd/{63 - len(self.state.files)}"
            self.state.files[place] = self.substitution(part)
            return [place]
        return [self.substitution(part).rstrip("\n")]

    def substitution(self, part: tree.Substitution, name: str | None = None) -> str:
        """Return what `$(…)` prints; where that is unknown, a mark named like the variable that takes it."""
        output = self.output_of(self.state, part.body)
        if output is not None:
            return output
        return self.state.unset(name or f"output_of_line_{part.line}", part.line, computed=True)

    def arithmetic(self, expression: tree.Word, line: int, unset_is_zero: bool = False) -> str:
        """Return the number of `$((…))`, or a mark where it depends on what is not known."""
        unknown: list[str] = []

        def known(text: str) -> str:
            number = self.state.known(text, line) if unset_is_zero and has_unset(text) else text
            if number is None or has_unset(number):
                unknown.append(text)
                raise NotComputable
            return number

        def value(name: str) -> str:
            name, _, index = name.partition("[")
            word = (tree.LiteralText(index.removesuffix("]")),) if index else None
            return known(" ".join(self._parameter(tree.Parameter(name, line, index=word))))

        def assign(name: str, number: str) -> None:
            name, _, index = name.partition("[")
            if index:
                self.state.assign_entry(name, self.index(name, (tree.LiteralText(index.removesuffix("]")),)), number)
            else:
                self.state.assign(name, number)

        try:
            return str(compute(known(self.text(expression)), value, assign))
        except NotComputable:
            # the first variable that is missing: with a value for it, the number is computed
            names = [name for text in unknown for name in unset_names(text)] or [f"number_of_line_{line}"]
            return self.state.unset(names[0], line, computed=not unknown)

    # assignments

    def assign(
        self, assignment: tree.Assignment, line: int, keyed: bool = False, local: Callable[[str], None] | None = None
    ) -> None:
        name, state = assignment.name, self.state
        current = state.variables.get(state.target(name))
        if assignment.array:
            old = current if isinstance(current, Array) else Array([current] if current else [])
            keyed = keyed or old.keyed
            array = old if assignment.append else Array(keyed=keyed)
            array.keyed = keyed
            self.fill(array, name, assignment.value)  # type: ignore[arg-type]
            if local is not None:
                local(name)
            state.changed(name)
            return state.assign(name, array)
        word: tree.Word = assignment.value  # type: ignore[assignment]
        if len(word) == 1 and isinstance(word[0], tree.Substitution) and not word[0].file:
            value = self.substitution(word[0], name).rstrip("\n")
        else:
            value = self.text(word)
        if local is not None:
            local(name)
        index = None if assignment.index is None else self.index(name, assignment.index)
        if index is None and isinstance(current, Array) and local is None:
            index = "0"
        current = state.variables.get(state.target(name))
        if assignment.append:
            value = (current.get(index or "0", "") if isinstance(current, Array) else current or "") + value
        if index is not None:
            return state.assign_entry(name, index, value)
        return state.assign(name, value)

    def fill(self, array: Array, name: str, words: Sequence[tree.Word]) -> None:
        following = 0 if array.keyed else array.following()
        for entry in self.fields(words):
            match = re.match(r"\[([^\]]+)\]=", entry)
            if match is None and array.keyed:
                continue
            index = str(following) if match is None else match[1]
            if match is not None and not array.keyed:
                number = self.arithmetic((tree.LiteralText(match[1]),), 0)
                if not number.isdecimal():
                    array.keyed = True
                index = number if number.isdecimal() else match[1]
            array[index] = entry if match is None else entry[match.end() :]
            following = 0 if array.keyed else int(index) + 1

    # parameters

    def _parameter(self, part: tree.Parameter) -> list[str]:
        state = self.state
        if part.prefix == "!":
            part, listed = self._indirect(part)
            if listed is not None:
                return listed
        every = part.index in _EVERY or part.name in ("@", "*")
        known = self._known(part)
        if known is None and isinstance(state.variables.get(state.target(part.name)), Array):
            known = []
        if part.prefix == "#":
            entries = known if known is not None else [] if every else [self._missing(part.name, part.line)]
            text = state.known(entries[0], part.line) if entries and not every else ""
            return [entries[0] if text is None else str(len(entries) if every else len(text))]
        entries = [self._missing(part.name, part.line)] if known is None else known
        if part.operator:
            entries = self._operated(part, entries, every)
        if not every:
            if not any(entries[:1]):
                self._assume_empty(part.name)
            return entries[:1] or [""]
        if part.quoted and (part.index == _EVERY[1] or part.name == "*"):
            separator = state.variables.get("IFS", " ")
            return [str(separator)[:1].join(entries)]
        return entries

    def _indirect(self, part: tree.Parameter) -> tuple[tree.Parameter, list[str] | None]:
        """Return the variable that `${!X}` stands for, or the names of `${!X*}`, the indexes of `${!X[@]}`."""
        state = self.state
        if part.operator == "names":
            return part, sorted(name for name in state.variables if name.startswith(part.name))
        if part.index in _EVERY:
            value = state.variables.get(state.target(part.name))
            return part, value.indexes() if isinstance(value, Array) else [] if value is None else ["0"]
        known = self._known(replace(part, prefix=""))
        text = known[0] if known else self._missing(part.name, part.line)
        match = re.fullmatch(r"(\w+)(?:\[(\w+|@|\*)\])?", text)
        if match is None:
            return part, [self._missing(part.name, part.line)]
        index = (tree.LiteralText(match[2]),) if match[2] else None
        return replace(part, name=match[1], index=index, prefix=""), None

    def _known(self, part: tree.Parameter) -> list[str] | None:
        """Return the entries of a variable, or None where it is not set."""
        state, name = self.state, part.name
        if name in ("@", "*", "#") and not state.has_arguments and not state.arguments:
            if name != "#":
                state.note(part.line, "the script's own arguments are passed on; none were given")
            state.assume("#", part.line)
        if name in ("@", "*"):
            return [state.path, *state.arguments] if part.operator == ":" else list(state.arguments)
        if name == "#":
            return [str(len(state.arguments))]
        position = whole_number_in(name)
        if position and (state.has_arguments or position <= len(state.arguments)):
            return state.arguments[position - 1 : position] or [""]
        value = state.variables.get(state.target(name))
        if value is not None:
            return self._entries(value, part)
        if name in ("0", "BASH_SOURCE"):
            return [state.path]
        if name in ("?", "PIPESTATUS"):
            return ["0"]
        if name == "FUNCNAME":
            return ["main"]
        return [state.folder] if name == "PWD" else None

    def _entries(self, value: str | Array, part: tree.Parameter) -> list[str] | None:
        if part.index in _EVERY:
            return value.entries() if isinstance(value, Array) else [value]
        if isinstance(value, str):
            return [value] if part.index is None or self.index(part.name, part.index) == "0" else None
        index = "0" if part.index is None else self.index(part.name, part.index)
        if has_unset(index):
            return [index]
        if not value.keyed and index.startswith("-"):
            index = str(value.following() + int(index))
        return [value[index]] if index in value else None

    def index(self, name: str, word: tree.Word) -> str:
        """Return the index of an entry: a key of a map, otherwise a number."""
        value = self.state.variables.get(self.state.target(name))
        text = self.text(word)
        if (isinstance(value, Array) and value.keyed) or _NUMBER.fullmatch(text):
            return text
        return self.arithmetic((tree.LiteralText(text),), 0)

    def _missing(self, name: str, line: int) -> str:
        name = _SPECIAL.get(name, name)
        value = self.state.unset(name, line)
        if self.state.stops_at_unset and self.state.is_null(value) and has_unset(value):
            self.state.ends(f"${name}", line, f"{reason((name,))} and `set -u` forbids it", goes_on=True)
        return value

    def _operated(self, part: tree.Parameter, entries: list[str], every: bool) -> list[str]:
        """Apply cutting, replacing, slices and cases; a text with an unknown part stays as it is."""
        operator = part.operator
        if operator == ":":
            return self._sliced(part, entries, every)
        if operator == "@":
            return entries
        argument, new = self.pattern(part.argument), ""
        if operator[0] == "/":
            argument, _, new = _at_slash(argument)
        self.state.spend(sum(map(len, entries)) + len(argument))
        return [
            entry if has_unset(entry + argument) else self._changed(entry, operator, argument, new) for entry in entries
        ]

    def _changed(self, text: str, operator: str, argument: str, new: str) -> str:
        if operator[0] in "^,":
            change = str.upper if operator[0] == "^" else str.lower
            return change(text) if len(operator) == 2 else change(text[:1]) + text[1:]
        pattern = ShellPattern(argument, self.state.spend)
        longest = max if operator in ("##", "%", "/#") else min
        if operator in ("#", "##", "/#"):
            end = longest(pattern.ends(text, 0), default=None)
            return text if end is None else new + text[end:]
        if operator in ("%", "%%", "/%"):
            start = longest(pattern.starts(text), default=None)
            return text if start is None else text[:start] + new
        return pattern.replaced(text, new, once=operator == "/") if argument else text

    def _sliced(self, part: tree.Parameter, entries: list[str], every: bool) -> list[str]:
        texts = self.text(part.argument).split(":")
        numbers = [self.arithmetic((tree.LiteralText(text),), part.line) for text in texts]
        sequence: Sequence[str] = entries if every else entries[0] if entries else ""
        if not every and entries and has_unset(entries[0]) and self.state.is_null(entries[0]):
            return entries
        if not all(map(_NUMBER.fullmatch, numbers)) or (has_unset("".join(entries)) and not every):
            return [self.state.unset(part.name, part.line, computed=True)]
        start = int(numbers[0])
        start = start + len(sequence) if start < 0 else start
        stop = len(sequence)
        if len(numbers) > 1:
            length = int(numbers[1])
            stop = start + length if length >= 0 else len(sequence) + length
        cut = sequence[start:stop] if start >= 0 else sequence[:0]
        return [cut] if isinstance(cut, str) else list(cut)

    # braces

    def _brace_alternatives(self, word: tree.Word) -> Iterator[tree.Word]:
        """Yield the words that `{a,b}` and `{1..4}` make of one."""
        for place, part in enumerate(word):
            match = _BRACES.search(part.text) if isinstance(part, tree.LiteralText) and not part.quoted else None
            if isinstance(part, tree.LiteralText) and match is not None:
                length = sum(len(each.text) for each in word if isinstance(each, tree.LiteralText)) + len(word)
                before, after = part.text[: match.start()], part.text[match.end() :]
                for choice in _choices(match[1]) or ():
                    self.state.spend(length)
                    texts = (tree.LiteralText(before + choice + after),) if before or choice or after else ()
                    yield from self._brace_alternatives((*word[:place], *texts, *word[place + 1 :]))
                if _choices(match[1]) is not None:
                    return
        yield word


def _choices(inside: str) -> Sequence[str] | Iterator[str] | None:
    """Return what `a,b` or `1..4` in braces stand for, None for what bash leaves as it is."""
    match = _RANGE.fullmatch(inside)
    if match is None:
        return inside.split(",") if "," in inside else None
    numbers = [text.lstrip("-").isdigit() for text in match.groups()[:2]]
    if numbers[0] != numbers[1]:
        return None
    first, last = (int(text) if numbers[0] else ord(text) for text in match.groups()[:2])
    step = max(abs(int(match[3] or 1)), 1)
    series = range(first, last + 1, step) if last >= first else range(first, last - 1, -step)
    if not numbers[0]:
        return map(chr, series)
    padded = re.search(r"(^|\.\.)-?0\d", inside)
    width = max(len(match[1]), len(match[2])) if padded else 0
    return (f"{number:0{width}d}" for number in series)


def _at_slash(text: str) -> tuple[str, str, str]:
    """Split the argument of `${X/old/new}` at the first slash that is not quoted."""
    match = re.match(r"((?:[^\\/]|\\.)*)/?", text, re.DOTALL)
    assert match is not None
    new = text[match.end() :]
    return match[1], "/", re.sub(r"\\(.)", r"\1", new, flags=re.DOTALL)
