"""The words of bash: quotes, expansions, here-documents. `shell_syntax.py` reads the commands that are made of them."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby

from llmlaunch.command_lines import shell_tree as tree
from llmlaunch.command_lines.shell_state import plain

DEEPEST = 40
METACHARACTERS = " \t\n;&|<>()"

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_OPERATOR = re.compile(r":?[-=?+]|%%|%|##|#|//|/[#%]?|\^\^|\^|,,|,|:|@")
_OPEN_PLACE = re.compile(r"<([A-Za-z][^<>\n;|&]*)>")
_OPEN_NAME = re.compile(r"<([A-Z][A-Z_]+)>")
_EXTENDED = re.compile(r"[^{}\"'$]*[?*+@!]\([^{}()]*\)")
_SPECIAL = "@*#?$!-"


class ShellSyntaxError(Exception):
    """Text that is no bash, or that is nested too deeply. `before` holds the tree of what stands before it."""

    def __init__(self, message: str, line: int, before: tree.Statements | None = None) -> None:
        super().__init__(message)
        self.line, self.before = line, before or tree.Statements(())


@dataclass
class WordParser:
    text: str
    first_line: int
    step: Callable[[], None]  # called for each word
    depth: int = 0
    position: int = 0
    documents: list[tuple[str, bool, bool, list[tree.Redirect], int]] = field(default_factory=list)
    newlines: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.newlines = [match.start() for match in re.finditer("\n", self.text)]

    @property
    def line(self) -> int:
        return self.first_line + bisect.bisect_left(self.newlines, self.position)

    def fail(self, message: str) -> None:
        raise ShellSyntaxError(message, self.line)

    def at(self, text: str) -> bool:
        return self.text.startswith(text, self.position)

    def accept(self, text: str) -> bool:
        if self.at(text):
            self.position += len(text)
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            self.fail(f"{text!r} is missing")

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > DEEPEST:
            self.fail(f"more than {DEEPEST} constructs inside each other")

    def blanks(self) -> None:
        """Pass over blanks, continued lines and a comment."""
        while self.position < len(self.text):
            if self.text[self.position] in " \t":
                self.position += 1
            elif self.at("\\\n"):
                self.position += 2
            elif self.at("#"):
                end = self.text.find("\n", self.position)
                self.position = len(self.text) if end < 0 else end
            else:
                return

    def newline(self) -> None:
        """Pass over the end of a line and the here-documents that follow it."""
        self.position += 1
        documents, self.documents = self.documents, []
        for delimiter, literal, tabs, redirects, place in documents:
            redirects[place] = tree.Redirect("<<", self.document(delimiter, literal, tabs))

    def separators(self) -> None:
        """Pass over blanks and empty lines."""
        self.blanks()
        while self.at("\n"):
            self.newline()
            self.blanks()

    def document(self, delimiter: str, literal: bool, tabs: bool) -> tree.Word:
        first, lines = self.line, []
        while self.position < len(self.text):
            end = self.text.find("\n", self.position)
            end = len(self.text) if end < 0 else end
            line = self.text[self.position : end]
            self.position = min(end + 1, len(self.text))
            line = line.lstrip("\t") if tabs else line
            if line == delimiter:
                break
            lines.append(line + "\n")
        text = "".join(lines)
        return (tree.LiteralText(text, True),) if literal else self.nested(text, first).quoted_parts(None)

    def nested(self, text: str, line: int) -> WordParser:
        self.deeper()
        parser = type(self)(text, line, self.step, self.depth)
        self.depth -= 1
        return parser

    def block(self, *closing: str) -> tree.Statements:
        """Read commands up to a word that ends them."""
        raise NotImplementedError

    def plain_text(self) -> str:
        match = re.compile(r"[\w.:-]+", re.ASCII).match(self.text, self.position)
        if match is None:
            raise ShellSyntaxError("a name is missing", self.line)
        self.position = match.end()
        return match[0]

    def word(self, stops: str = METACHARACTERS, may_be_empty: bool = False) -> tree.Word:
        """Read a word up to one of the characters that end it."""
        self.step()
        parts = self.unquoted_parts(stops)
        if not parts and not may_be_empty:
            self.fail("a word is missing")
        return parts

    def word_parts(self) -> tree.Word:
        """Read all that is left as one word."""
        return self.unquoted_parts("")

    def unquoted_parts(self, stops: str) -> tree.Word:
        parts: list[tree.Part] = []
        while self.position < len(self.text):
            character = self.text[self.position]
            if character in "?*+@!" and ")" in stops and self.text.startswith("(", self.position + 1):
                self.fail(f"a pattern of extglob, {character}(...), is not read")
            elif character in stops:
                part = self.angle() if character in "<>" else None
                if part is None:
                    break
                parts.append(part)
            elif character == "'":
                parts.append(tree.LiteralText(self.until("'", 1), True))
            elif character == '"':
                self.position += 1
                parts.extend(self.quoted_parts('"') or (tree.LiteralText("", True),))
                self.expect('"')
            elif self.at("$'"):
                parts.append(tree.LiteralText(escaped(self.until("'", 2, escapes=True)), True))
            elif self.at('$"'):
                self.position += 1
            elif self.at("\\\n"):
                self.position += 2
            elif character == "\\":
                parts.append(tree.LiteralText(self.text[self.position + 1 : self.position + 2], True))
                self.position += 2
            elif character in "$`":
                parts.append(self.expansion(False))
            else:
                match = re.compile(f"[^$`'\"\\\\?*+@!{re.escape(stops)}]+").match(self.text, self.position)
                parts.append(tree.LiteralText(match[0] if match else character))
                self.position += len(match[0]) if match else 1
        return _joined(parts)

    def angle(self) -> tree.Part | None:
        """Read `<(…)`, or a place that the author of a script left open, such as `<Specify path>`."""
        line = self.line
        if self.at("<(") or self.at(">("):
            self.position += 2
            body = self.block()
            self.expect(")")
            return tree.Substitution(body, line, quoted=True, file=True)
        after_equals = self.text[self.position - 1 : self.position] == "="
        match = (_OPEN_PLACE if after_equals else _OPEN_NAME).match(self.text, self.position)
        if match is None:
            return None
        self.position = match.end()
        return tree.Parameter(re.sub(r"\W+", "_", match[1], flags=re.ASCII).strip("_") or "value", line, quoted=True)

    def angle_starts(self, position: int) -> bool:
        """Return whether `angle` reads what stands here, instead of a redirection."""
        return self.text.startswith(("<(", ">("), position) or _OPEN_NAME.match(self.text, position) is not None

    def quoted_parts(self, closing: str | None) -> tree.Word:
        """Read the inside of double quotes, or what a here-document holds where nothing closes it."""
        parts: list[tree.Part] = []
        escaped = '$`\\"' if closing else "$`\\"
        while self.position < len(self.text) and self.text[self.position] != closing:
            character = self.text[self.position]
            if character == "\\":
                following = self.text[self.position + 1 : self.position + 2]
                if following != "\n":
                    parts.append(
                        tree.LiteralText(
                            following if following and following in escaped else character + following, True
                        )
                    )
                self.position += 2
            elif character in "$`":
                parts.append(self.expansion(True))
            else:
                stop = re.compile('[$`\\\\"]' if closing else "[$`\\\\]")
                match = stop.search(self.text, self.position + 1)
                end = match.start() if match else len(self.text)
                parts.append(tree.LiteralText(self.text[self.position : end], True))
                self.position = end
        return _joined(parts)

    def until(self, closing: str, skipped: int, escapes: bool = False) -> str:
        """Return the text up to a quote, and pass over it."""
        start = self.position + skipped
        end = start
        while end < len(self.text) and self.text[end] != closing:
            end += 2 if escapes and self.text[end] == "\\" else 1
        if end >= len(self.text):
            self.fail(f"{closing} is missing")
        self.position = end + 1
        return self.text[start:end]

    def expansion(self, quoted: bool) -> tree.Part:
        self.step()
        line = self.line
        if self.at("`"):
            text = re.sub(r"\\([$`\\])", r"\1", self.until("`", 1, escapes=True))
            return tree.Substitution(self.nested(text, line).whole(), line, quoted)
        if self.at("$((") and self.closes_arithmetic(self.position + 3) is not None:
            return tree.Arithmetic(self.arithmetic(3), line, quoted)
        if self.accept("$["):
            text = self.until("]", 0)
            return tree.Arithmetic(self.nested(text, line).quoted_parts(None), line, quoted)
        if self.accept("$("):
            body = self.block()
            self.expect(")")
            return tree.Substitution(body, line, quoted)
        if self.accept("${"):
            return self.braced(line, quoted)
        name = _NAME.match(self.text, self.position + 1)
        if name is not None:
            self.position = name.end()
            return tree.Parameter(name[0], line, quoted)
        following = self.text[self.position + 1 : self.position + 2]
        if following and (following in _SPECIAL or following in "0123456789"):
            self.position += 2
            return tree.Parameter(following, line, quoted)
        self.position += 1
        return tree.LiteralText("$", quoted)

    def whole(self) -> tree.Statements:
        body = self.block()
        if self.position < len(self.text):
            self.fail(f"unexpected {self.text[self.position]!r}")
        return body

    def braced(self, line: int, quoted: bool) -> tree.Part:
        self.deeper()
        prefix = ""
        if self.text[self.position : self.position + 1] in ("#", "!") and not self.text.startswith(
            "}", self.position + 1
        ):
            prefix = self.text[self.position]
            self.position += 1
        match = re.compile(r"[A-Za-z_]\w*|\d+|[@*#?$!-]", re.ASCII).match(self.text, self.position)
        if match is None:
            raise ShellSyntaxError("this form of ${…} is not read", line)
        self.position = match.end()
        index = None
        if self.accept("["):
            index = self.unquoted_parts("]")
            self.expect("]")
        operator = _OPERATOR.match(self.text, self.position)
        argument: tree.Word = ()
        if prefix == "!" and self.text.startswith(("*}", "@}"), self.position):
            self.position += 2
            self.depth -= 1
            return tree.Parameter(match[0], line, quoted, "!", operator="names")
        if operator is not None:
            self.position = operator.end()
            if operator[0][0] in "#%/" and _EXTENDED.match(self.text, self.position):
                self.fail("a pattern of extglob is not read")
            argument = self.argument(quoted and operator[0].lstrip(":") in ("-", "=", "+", "?"))
        self.expect("}")
        self.depth -= 1
        return tree.Parameter(match[0], line, quoted, prefix, index, operator[0] if operator else "", argument)

    def argument(self, quoted: bool) -> tree.Word:
        if not quoted:
            return self.unquoted_parts("}")
        parts: list[tree.Part] = []
        while self.position < len(self.text) and not self.at("}"):
            if self.accept('"'):
                parts.extend(self.quoted_parts('"'))
                self.expect('"')
            else:
                start = self.position
                inner = re.compile(r"[^}\"$`\\]+").match(self.text, self.position)
                if inner is not None:
                    self.position = inner.end()
                    parts.append(tree.LiteralText(inner[0], True))
                elif self.text[start] in "$`":
                    parts.append(self.expansion(True))
                else:
                    parts.append(tree.LiteralText(self.text[start + 1 : start + 2], True))
                    self.position += 2
        return _joined(parts)

    def closes_arithmetic(self, start: int) -> int | None:
        """Return where `((` that ends at `start` closes; None where it is something else than arithmetic."""
        depth = 0
        for match in re.compile(r"[()]").finditer(self.text, start, start + 2000):
            depth += 1 if match[0] == "(" else -1
            if depth < 0:
                return match.start() if self.text.startswith("))", match.start()) else None
        return None

    def arithmetic_text(self, skipped: int) -> str:
        start = self.position + skipped
        end = self.closes_arithmetic(start)
        if end is None:
            raise ShellSyntaxError("'))' is missing", self.line)
        self.position = end + 2
        return self.text[start:end]

    def arithmetic(self, skipped: int) -> tree.Word:
        line = self.line
        text = self.arithmetic_text(skipped)
        return self.nested(text.replace('"', ""), line).quoted_parts(None)


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b", "E": "\x1b"}
_ESCAPE = re.compile(r"\\(?:([ntrabfveE\\'\"?])|x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|([0-7]{1,3}))")


def escaped(text: str) -> str:
    """Return text with the escapes of `$'…'`, printf and `echo -e` in it."""

    def character(match: re.Match[str]) -> str:
        letter, hexadecimal, code, octal = match.groups()
        number = int(hexadecimal or code or octal or "0", 8 if octal else 16)
        return _ESCAPES.get(letter, letter) if letter else plain(chr(number)).replace("\0", "")

    return _ESCAPE.sub(character, text)


def _joined(parts: list[tree.Part]) -> tree.Word:
    """Join neighbouring texts of one kind."""
    joined: list[tree.Part] = []
    for kind, group in groupby(parts, lambda part: part.quoted if isinstance(part, tree.LiteralText) else None):
        if kind is None:
            joined.extend(group)
        else:
            joined.append(tree.LiteralText("".join(part.text for part in group), kind))  # type: ignore[union-attr]
    return tuple(joined)
