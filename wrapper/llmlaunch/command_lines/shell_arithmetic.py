"""Arithmetic as `$((…))` has it: whole numbers, variables by their names, assignments."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

__all__ = ["NotComputable", "compute"]

_TOKEN = re.compile(
    r"\s*(0[xX][0-9a-fA-F]+|\d+#\w+|\d+|[A-Za-z_]\w*(?:\[\w+\])?|\*\*|\+\+|--|<<|>>|[-+*/%&|^]=|[<>=!]=|&&|\|\||\S)",
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
    if len(expression) > 2000:
        raise NotComputable
    try:
        return _Expression(_TOKEN.findall(expression), value, assign).whole()
    except (ZeroDivisionError, ValueError, IndexError, RecursionError):
        raise NotComputable from None


class _Expression:
    def __init__(self, tokens: list[str], value: Callable[[str], str], assign: Callable[[str, str], None]) -> None:
        self.tokens, self.value, self.assign = tokens, value, assign

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
        if len(self.tokens) > 1 and re.fullmatch(r"[A-Za-z_]\w*", self.tokens[0], re.ASCII):
            name, sign = self.tokens[:2]
            if sign == "=" or (sign.endswith("=") and sign[0] in "+-*/%&|^"):
                del self.tokens[:2]
                value = self.assignment()
                if sign != "=":
                    value = _applied(sign[0], self.number(name), value)
                self.assign(name, str(value))
                return value
        return self.choice()

    def choice(self) -> int:
        condition = self.binary(0)
        if not self.accept("?"):
            return condition
        first = self.assignment()
        if not self.accept(":"):
            raise NotComputable
        second = self.assignment()
        return first if condition else second

    def binary(self, level: int) -> int:
        if level == len(_LEVELS):
            return self.power()
        left = self.binary(level + 1)
        while sign := self.accept(*_LEVELS[level]):
            left = _applied(sign, left, self.binary(level + 1))
        return left

    def power(self) -> int:
        base = self.unary()
        return _applied("**", base, self.power()) if self.accept("**") else base

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
            if not self.accept(")"):
                raise NotComputable
            return value
        token = self.tokens.pop(0)
        value = self.number(token)
        step = self.accept("++", "--")
        if step:
            self.assign(token, str(value + (1 if step == "++" else -1)))
        return value

    def number(self, token: str, depth: int = 0) -> int:
        if re.fullmatch(r"\d+#\w+", token):
            base, digits = token.split("#")
            return int(digits, int(base))
        if token[:1] in tuple("0123456789"):
            return int(token, 0 if token[:2] in ("0x", "0X") else 8 if token.startswith("0") and token != "0" else 10)
        text = self.value(token).strip()
        if not text:
            return 0
        if depth > 8 or not re.fullmatch(r"-?\w+", text, re.ASCII):
            raise NotComputable
        return -self.number(text[1:], depth + 1) if text[0] == "-" else self.number(text, depth + 1)


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
