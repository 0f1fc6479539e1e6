"""Conditions of a script, `test`, `[ … ]` and `[[ … ]]`, as far as its text decides them, patterns of bash,
and arithmetic as `$((…))` has it."""

from __future__ import annotations

import operator
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


_TOKEN = re.compile(
    r"\s*(0[xX][0-9a-fA-F]+|\d+#\w+|\d+|[A-Za-z_]\w*(?:\[[^\[\]]+\])?|\*\*|\+\+|--|<<=|>>=|<<|>>|[-+*/%&|^]=|[<>=!]=|&&|\|\||\S)",
    re.ASCII,
)
_LEVELS = (
    ("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", ">", "<=", ">="), ("<<", ">>"), ("+", "-"),
    ("*", "/", "%"),
)  # fmt: skip
_LARGEST = 1 << 63


_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "||": lambda left, right: bool(left) or bool(right),
    "&&": lambda left, right: bool(left) and bool(right),
    "|": operator.or_, "^": operator.xor, "&": operator.and_, "==": operator.eq, "!=": operator.ne,
    "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge, "<<": operator.lshift,
    ">>": operator.rshift, "+": operator.add, "-": operator.sub, "*": operator.mul, "**": operator.pow,
}  # fmt: skip


class NotComputable(Exception):
    """An expression whose value only the run of the script would show."""


def compute(expression: str, value: Callable[[str], str], assign: Callable[[str, str], None]) -> int:
    """Return the value of an expression. `value` returns a variable's text. Raises NotComputable."""
    try:
        return _Expression(expression, value, assign).whole()
    except (ZeroDivisionError, ValueError, IndexError, RecursionError):
        raise NotComputable from None


class _Expression:
    def __init__(
        self, text: str, value: Callable[[str], str], assign: Callable[[str, str], None], depth: int = 0
    ) -> None:
        self.tokens, self.value, self.set, self.depth = _TOKEN.findall(text), value, assign, depth
        self.skipped = 0  # inside what `&&`, `||` and `?` do not reach
        if len(text) > 2000 or depth > 8:
            raise NotComputable

    def whole(self) -> int:
        if not self.tokens:
            return 0
        result = self.assignment()
        while self.accept(","):
            result = self.assignment()
        if self.tokens:
            raise NotComputable
        return result

    def accept(self, *tokens: str) -> str:
        return self.tokens.pop(0) if self.tokens and self.tokens[0] in tokens else ""

    def assignment(self) -> int:
        if len(self.tokens) > 1 and re.match(r"[A-Za-z_]", self.tokens[0]):
            name, sign = self.tokens[:2]
            if sign == "=" or (
                sign.endswith("=") and sign[:-1] in ("+", "-", "*", "/", "%", "&", "|", "^", "<<", ">>")
            ):
                del self.tokens[:2]
                value = self.assignment()
                if sign != "=":
                    value = self.applied(sign[:-1], self.number(name), value)
                self.assign(name, str(value))
                return value
        return self.choice()

    def choice(self) -> int:
        condition = self.binary(0)
        if not self.accept("?"):
            return condition
        first = self.aside(not condition, self.assignment)
        if not self.accept(":"):
            raise NotComputable
        second = self.aside(bool(condition), self.choice)
        return first if condition else second

    def aside(self, skipped: bool, part: Callable[[], int]) -> int:
        """Read a part, and compute it only where it is not skipped."""
        self.skipped += skipped
        value = part()
        self.skipped -= skipped
        return value

    def assign(self, name: str, value: str) -> None:
        if not self.skipped:
            self.set(name, value)

    def applied(self, sign: str, left: int, right: int) -> int:
        return 0 if self.skipped else _applied(sign, left, right)

    def binary(self, level: int) -> int:
        if level == len(_LEVELS):
            return self.power()
        left = self.binary(level + 1)
        while sign := self.accept(*_LEVELS[level]):
            decided = (sign == "&&" and not left) or (sign == "||" and bool(left))
            left = self.applied(sign, left, self.aside(decided, lambda: self.binary(level + 1)))
        return left

    def power(self) -> int:
        base = self.unary()
        return self.applied("**", base, self.power()) if self.accept("**") else base

    def unary(self) -> int:
        sign = self.accept("-", "+", "!", "~", "++", "--")
        if not sign:
            return self.operand()
        if sign in ("++", "--"):
            name = self.tokens.pop(0)
            value = self.number(name) + (1 if sign == "++" else -1)
            self.assign(name, str(value))
            return value
        value = self.unary()
        return {"-": -value, "+": value, "!": int(not value), "~": ~value}[sign]

    def operand(self) -> int:
        if self.accept("("):
            value = self.assignment()
            while self.accept(","):
                value = self.assignment()
            if not self.accept(")"):
                raise NotComputable
            return value
        token = self.tokens.pop(0)
        value = self.number(token)
        step = self.accept("++", "--")
        if step:
            self.assign(token, str(value + (1 if step == "++" else -1)))
        return value

    def number(self, token: str) -> int:
        if re.fullmatch(r"\d+#\w+", token):
            base, digits = token.split("#")
            return int(digits, int(base))
        if token[:1] in tuple("0123456789"):
            return int(token, 0 if token[:2] in ("0x", "0X") else 8 if token.startswith("0") and token != "0" else 10)
        if not re.match("[A-Za-z_]", token):
            raise NotComputable
        if self.skipped:
            return 0
        text = self.value(token).strip()
        return _Expression(text, self.value, self.set, self.depth + 1).whole()


def _applied(sign: str, left: int, right: int) -> int:
    if sign in ("/", "%"):
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return quotient if sign == "/" else left - right * quotient
    if sign in ("**", "<<", ">>") and not 0 <= right < 64:
        raise NotComputable
    result = int(_OPERATORS[sign](left, right))
    if not -_LARGEST <= result < _LARGEST:
        raise NotComputable
    return result
