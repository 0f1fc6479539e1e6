"""Arithmetic as `$((…))` has it: whole numbers, variables by their names, assignments."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

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
