"""Conditions of a script, `test`, `[ … ]` and `[[ … ]]`, as far as its text decides them, and patterns of bash."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence

from llmlaunch.command_lines.shell_state import Array, State, exists, has_unset
from llmlaunch.rundir.foreign_values import whole_number_in

_BINARY = ("=", "==", "!=", "<", ">", "=~", "-eq", "-ne", "-lt", "-le", "-gt", "-ge", "-ef", "-nt", "-ot")
CLASSES = {
    "alpha": "A-Za-z", "digit": "0-9", "alnum": "A-Za-z0-9", "space": r"\s", "blank": r" \t", "upper": "A-Z",
    "lower": "a-z", "xdigit": "0-9A-Fa-f", "word": r"\w", "punct": re.escape(string.punctuation),
}  # fmt: skip
_PARTS = re.compile(
    r"\\(?P<quoted>.)|(?P<wild>[*?])|\[(?P<negated>[!^]?)(?P<set>(?:\]|)(?:\[:\w+:\]|\\.|[^\]\\])*)\]|(?P<plain>.)",
    re.DOTALL,
)
LONGEST_SEARCHED = 300

Token = str | re.Pattern[str]
_STAR = re.compile(".*", re.DOTALL)
_WILD = {"*": _STAR, "?": re.compile(".", re.DOTALL)}


class ShellPattern:
    """A pattern with `*`, `?` and `[…]`; a backslash quotes a character. Matched place by place, so that the work is
    bounded by the lengths of pattern and text; `spend` counts it before it is done."""

    def __init__(self, text: str, spend: Callable[[int], None]) -> None:
        self._spend, self.tokens = spend, _tokens(text)

    def spend(self, steps: int) -> None:
        self._spend(8 * steps)  # a step takes longer than a character

    def matches(self, text: str) -> bool:
        return len(text) in self.ends(text, 0)

    def ends(self, text: str, start: int) -> set[int]:
        """Return all places where a match that starts at `start` may end."""
        places = {start}
        for token in self.tokens:
            self.spend(1 + len(places))
            if not places:
                break
            if token is _STAR:
                self.spend(len(text))
                places = set(range(min(places), len(text) + 1))
            elif isinstance(token, str):
                places = {place + 1 for place in places if text.startswith(token, place)}
            else:
                places = {place + 1 for place in places if token.match(text, place)}
        return places

    def starts(self, text: str) -> set[int]:
        """Return all places where a match may start that ends with the text."""
        return {start for start in range(len(text) + 1) if len(text) in self.ends(text, start)}

    def replaced(self, text: str, new: str, once: bool) -> str:
        """Return a text with its longest matches replaced, from the left."""
        if not text:
            return new if self.matches("") else ""
        parts, position = [], 0
        while position <= len(text):
            end = max(self.ends(text, position), default=position)
            if end > position:
                self.spend(len(new))
                parts.append(new)
                position = end
                if once:
                    break
            else:
                parts.append(text[position : position + 1])
                position += 1
        return "".join(parts) + text[position:]


def _tokens(text: str) -> list[Token]:
    tokens: list[Token] = []
    for part in _PARTS.finditer(text):
        if part["set"] is not None:
            inside = re.sub(r"\[:(\w+):\]", lambda match: CLASSES.get(match[1], ""), part["set"])
            tokens.append(_compiled(f"[{'^' if part['negated'] else ''}{inside.replace('[', chr(92) + '[')}]"))
        else:
            tokens.append(_WILD.get(part["wild"]) or part["quoted"] or part["plain"])
    return tokens


def _compiled(expression: str) -> re.Pattern[str]:
    try:
        return re.compile(expression, re.DOTALL)
    except re.error:
        return re.compile("(?!)")


def test_outcome(state: State, words: Sequence[str], line: int, patterns: bool) -> bool | None:
    """Return whether a test holds; None where only the run would show it. `patterns`: of `[[ … ]]`.

    A variable that nobody sets counts as empty, as in a fresh shell.
    """
    test = _Test(state, list(words), line, patterns)
    outcome = test.either()
    return outcome if not test.words else None


class _Test:
    def __init__(self, state: State, words: list[str], line: int, patterns: bool) -> None:
        self.state, self.words, self.line, self.patterns = state, words, line, patterns

    def either(self) -> bool | None:
        outcome = self.both()
        while self.words[:1] in (["||"], ["-o"]):
            del self.words[0]
            other = self.both()
            outcome = True if outcome or other else None if None in (outcome, other) else False
        return outcome

    def both(self) -> bool | None:
        outcome = self.single()
        while self.words[:1] in (["&&"], ["-a"]):
            del self.words[0]
            other = self.single()
            outcome = False if False in (outcome, other) else None if None in (outcome, other) else True
        return outcome

    def single(self) -> bool | None:
        words = self.words
        if not words:
            return False
        if words[0] == "!" and len(words) > 1:
            del words[0]
            outcome = self.single()
            return None if outcome is None else not outcome
        if len(words) > 2 and words[1] in _BINARY:
            left, operator, right = words[:3]
            del words[:3]
            return self.compared(left, operator, right)
        if words[0] == "(" and ")" in words:
            del words[0]
            outcome = self.either()
            if words[:1] == [")"]:
                del words[0]
            return outcome
        if len(words) > 1 and re.fullmatch("-[a-zA-Z]", words[0]):
            operator, operand = words[:2]
            del words[:2]
            return self.examined(operator, operand)
        return self.examined("-n", words.pop(0))

    def examined(self, operator: str, operand: str) -> bool | None:
        text = self.state.known(operand, self.line)
        if operator == "-v":
            return self.is_set(operand)
        if text is None:
            return None
        if operator in ("-n", "-z"):
            return (text == "") == (operator == "-z")
        if operator not in ("-f", "-d", "-e", "-r", "-w", "-x", "-s", "-L", "-h"):
            return None
        if text == "":
            return False
        if has_unset(operand):
            return None
        place = self.state.resolved(operand)
        return True if place in self.state.files or exists(place) else None

    def is_set(self, name: str) -> bool:
        name, bracket, index = name.partition("[")
        value = self.state.variables.get(self.state.target(name))
        if value is None:
            self.state.assume(name, self.line)
        return index.removesuffix("]") in value if bracket and isinstance(value, Array) else value is not None

    def compared(self, left: str, operator: str, right: str) -> bool | None:
        first, second = self.state.known(left, self.line), self.state.known(right, self.line)
        if first is None or second is None:
            return None
        if operator in ("=", "==", "!="):
            same = ShellPattern(second, self.state.spend).matches(first) if self.patterns else first == second
            return same == (operator != "!=")
        if operator == "=~":
            return self.searched(second, first)
        if operator in ("<", ">"):
            return first < second if operator == "<" else first > second
        numbers = [0 if not text.strip() else _integer(text) for text in (first, second)]
        if operator not in ("-eq", "-ne", "-lt", "-le", "-gt", "-ge") or numbers[0] is None or numbers[1] is None:
            return None
        low, high = numbers[0], numbers[1]
        return {
            "-eq": low == high, "-ne": low != high, "-lt": low < high,
            "-le": low <= high, "-gt": low > high, "-ge": low >= high,
        }[operator]  # fmt: skip

    def searched(self, expression: str, text: str) -> bool | None:
        """Return whether a regular expression of POSIX fits; None for one that might take long."""
        expression = re.sub(r"\[:(\w+):\]", lambda match: CLASSES.get(match[1], ""), expression)
        repeated = re.search(r"\)[*+{]", expression)
        nested = repeated is not None and re.search(r"[*+?|{]", expression[: repeated.start()])
        if nested or len(re.findall(r"[*+]|\{\d*,", expression)) > 3 or len(text) + len(expression) > LONGEST_SEARCHED:
            return None
        match = _compiled(expression).search(text)
        if match is not None:
            self.state.assign("BASH_REMATCH", Array([match[0], *(group or "" for group in match.groups())]))
        return match is not None


def _integer(text: str) -> int | None:
    digits = text.strip()
    number = whole_number_in(digits.lstrip("+-"))
    return None if number is None else -number if digits.startswith("-") else number
