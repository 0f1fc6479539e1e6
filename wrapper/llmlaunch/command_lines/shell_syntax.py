"""The syntax of bash: a script's text as a tree. Nothing is looked up, expanded or executed here.

Bash's own grammar (its manual, "Shell Grammar" and "Shell Expansions").
"""

from __future__ import annotations

import re
from collections.abc import Callable

from llmlaunch.command_lines import shell_tree as tree
from llmlaunch.command_lines.shell_word_syntax import METACHARACTERS, ShellSyntaxError, WordParser

DECLARATIONS = ("export", "declare", "typeset", "local", "readonly")

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[(?:[^\[\]\n]|\[[^\]\n]*\])*\])?(\+?)=", re.ASCII)
_REDIRECT = re.compile(r"(?:\d+|\{\w+\})?(<<<|<<-|<<|<>|>>|>&|<&|>\||>|<)|(&>>|&>)", re.ASCII)
_CLOSING = ("then", "elif", "else", "fi", "do", "done", "esac", "}")


def parse_script(text: str, first_line: int, step: Callable[[], None]) -> tree.Statements:
    """Return the tree of a script; `step` is called for each word.

    Raises ShellSyntaxError, which holds what is before the error.
    """
    parser = _Parser(text.replace("\r\n", "\n"), first_line, step)
    statements: list[tree.Node] = []
    try:
        parser.gather(statements, ())
        if parser.position < len(parser.text):
            parser.fail(f"unexpected {parser.text[parser.position]!r}")
    except ShellSyntaxError as error:
        raise ShellSyntaxError(str(error), error.line, tree.Statements(tuple(statements))) from None
    return tree.Statements(tuple(statements))


class _Parser(WordParser):
    def gather(self, statements: list[tree.Node], closing: tuple[str, ...]) -> None:
        """Append statements up to a closing word or bracket, which is left to be read."""
        self.deeper()
        self.separators()
        while self.position < len(self.text) and not self.at(")") and not self.at(";;") and not self.at(";&"):
            reserved = self.reserved()
            if reserved in closing:
                break
            if reserved in _CLOSING:
                self.fail(f"unexpected {reserved!r}")
            statements.append(self.and_or())
            self.blanks()
            if self.at(";;") or self.at(";&"):
                break
            ended = self.accept(";") or self.accept("&") or self.at("\n") or self.at(")")
            if not ended and self.position < len(self.text):
                self.fail(f"unexpected {self.text[self.position]!r}")
            self.separators()
        self.depth -= 1

    def block(self, *closing: str) -> tree.Statements:
        statements: list[tree.Node] = []
        self.gather(statements, closing)
        return tree.Statements(tuple(statements))

    def reserved(self) -> str:
        """Return the reserved word that stands here, or nothing."""
        match = re.compile(r"[a-z]+|[{}!]|\[\[").match(self.text, self.position)
        if match is None or (match.end() < len(self.text) and self.text[match.end()] not in METACHARACTERS):
            return ""
        return match[0]

    def keyword(self, *names: str) -> str:
        """Pass over one of these reserved words and return it."""
        self.separators()
        reserved = self.reserved()
        if reserved not in names:
            self.fail(f"{' or '.join(map(repr, names))} is missing")
        self.position += len(reserved)
        return reserved

    def and_or(self) -> tree.Node:
        self.blanks()
        line = self.line
        node = self.pipeline()
        while True:
            self.blanks()
            operator = "&&" if self.at("&&") else "||" if self.at("||") else ""
            if not operator:
                return node
            self.position += 2
            self.separators()
            node = tree.AndOr(node, operator, self.pipeline(), line)

    def pipeline(self) -> tree.Node:
        self.blanks()
        line, negated = self.line, False
        while (word := self.reserved()) in ("!", "time"):
            negated ^= word == "!"
            self.position += len(word)
            self.blanks()
            if word == "time" and self.at("-p "):
                self.position += 3
        commands = [self.command()]
        self.blanks()
        while self.at("|") and not self.at("||"):
            self.position += 2 if self.at("|&") else 1
            self.separators()
            commands.append(self.command())
            self.blanks()
        return commands[0] if len(commands) == 1 and not negated else tree.Pipeline(tuple(commands), negated, line)

    def command(self) -> tree.Node:
        self.deeper()
        try:
            node = self.compound()
            if node is None:
                return self.simple()
            redirects = self.redirects()
            return tree.Statements((node,), redirects) if redirects else node
        finally:
            self.depth -= 1

    def compound(self) -> tree.Node | None:
        line, reserved = self.line, self.reserved()
        if self.at("((") and self.closes_arithmetic(self.position + 2) is not None:
            return tree.Conditional((self.arithmetic(2),), line, arithmetic=True)
        if self.accept("("):
            body = self.block()
            self.expect(")")
            return tree.Statements(body.statements, subshell=True)
        reader = {
            "{": self.group, "[[": self.test, "if": self.if_, "for": self.for_, "case": self.case,
            "while": self.while_, "until": self.while_, "function": self.function,
        }.get(reserved)  # fmt: skip
        if reader is not None:
            return reader()
        match = re.compile(r"([A-Za-z_][\w.:-]*)[ \t]*\([ \t]*\)", re.ASCII).match(self.text, self.position)
        if match is None:
            return None
        self.position = match.end()
        self.separators()
        return tree.Function(match[1], self.command())

    def group(self) -> tree.Node:
        self.keyword("{")
        body = self.block("}")
        self.keyword("}")
        return body

    def function(self) -> tree.Node:
        self.keyword("function")
        self.blanks()
        name = self.plain_text()
        self.blanks()
        if self.accept("("):
            self.blanks()
            self.expect(")")
        self.separators()
        return tree.Function(name, self.command())

    def if_(self) -> tree.Node:
        line, branches, otherwise = self.line, [], None
        word = self.keyword("if")
        while word in ("if", "elif"):
            condition = self.block("then")
            self.keyword("then")
            branches.append((condition, self.block("elif", "else", "fi")))
            word = self.keyword("elif", "else", "fi")
        if word == "else":
            otherwise = self.block("fi")
            self.keyword("fi")
        return tree.If(tuple(branches), otherwise, line)

    def while_(self) -> tree.Node:
        line, until = self.line, self.keyword("while", "until") == "until"
        condition = self.block("do")
        return tree.While(condition, self.loop_body(), until, line)

    def loop_body(self) -> tree.Statements:
        self.blanks()
        self.accept(";")
        closing = {"do": "done", "{": "}"}[self.keyword("do", "{")]
        body = self.block(closing)
        self.keyword(closing)
        return body

    def for_(self) -> tree.Node:
        line = self.line
        self.keyword("for")
        self.blanks()
        if self.at("(("):
            parts = self.arithmetic_text(2).split(";")
            if len(parts) != 3:
                self.fail("for (( )) needs three expressions")
            first, condition, after = (self.nested(part, line).quoted_parts(None) for part in parts)
            return tree.CountingFor((first, condition, after), self.loop_body(), line)
        name = self.plain_text()
        self.separators()
        words: list[tree.Word] | None = None
        if self.reserved() == "in":
            self.position += 2
            words = []
            self.blanks()
            while self.position < len(self.text) and self.text[self.position] not in ";\n":
                words.append(self.word())
                self.blanks()
        return tree.For(name, None if words is None else tuple(words), self.loop_body(), line)

    def case(self) -> tree.Node:
        line, items = self.line, []
        self.keyword("case")
        self.blanks()
        word = self.word()
        self.keyword("in")
        self.separators()
        while self.reserved() != "esac":
            self.accept("(")
            patterns = []
            while True:
                self.blanks()
                patterns.append(self.word())
                self.blanks()
                if not self.accept("|"):
                    break
            self.expect(")")
            body = self.block("esac")
            self.separators()
            ending = next((each for each in (";;&", ";;", ";&") if self.accept(each)), "")
            if not ending and self.reserved() != "esac":
                self.fail("';;' is missing")
            items.append(tree.CaseItem(tuple(patterns), body, ending))
            self.separators()
        self.keyword("esac")
        return tree.CaseCommand(word, tuple(items), line)

    def test(self) -> tree.Node:
        line = self.line
        words: list[tree.Word] = []
        self.keyword("[[")
        self.separators()
        while self.reserved() != "]]" and not self.at("]]"):
            match = re.compile(r"&&|\|\||[()<>]").match(self.text, self.position)
            after_match = bool(words) and words[-1] == (tree.LiteralText("=~"),)
            if match is not None and not after_match:
                self.position = match.end()
                words.append((tree.LiteralText(match[0]),))
            else:
                words.append(self.word(" \t\n" if after_match else METACHARACTERS))
            self.separators()
        self.expect("]]")
        return tree.Conditional(tuple(words), line)

    def simple(self) -> tree.Node:
        line = self.line
        assignments: list[tree.Assignment] = []
        words: list[tree.Word | tree.Assignment] = []
        redirects: list[tree.Redirect] = []
        while True:
            self.blanks()
            if self.redirect(redirects):
                continue
            if self.position >= len(self.text) or self.text[self.position] in METACHARACTERS:
                break
            declares = bool(words) and words[0] in [(tree.LiteralText(name),) for name in DECLARATIONS]
            assignment = self.assignment() if not words or declares else None
            if assignment is None:
                words.append(self.word())
            elif declares:
                words.append(assignment)
            else:
                assignments.append(assignment)
        if not words and not assignments and not redirects:
            self.fail("a command is missing")
        return tree.Simple(tuple(assignments), tuple(words), line, redirects)

    def assignment(self) -> tree.Assignment | None:
        match = _ASSIGNMENT.match(self.text, self.position)
        if match is None:
            return None
        line, append = self.line, bool(match[3])
        index = self.nested(match[2][1:-1], line).word_parts() if match[2] else None
        self.position = match.end()
        if not self.accept("("):
            return tree.Assignment(match[1], self.word(may_be_empty=True), append=append, index=index)
        words = []
        self.separators()
        while not self.at(")"):
            if self.position >= len(self.text):
                self.fail("')' is missing")
            words.append(self.word())
            self.separators()
        self.position += 1
        return tree.Assignment(match[1], tuple(words), array=True, append=append)

    def redirects(self) -> list[tree.Redirect]:
        redirects: list[tree.Redirect] = []
        self.blanks()
        while self.redirect(redirects):
            self.blanks()
        return redirects

    def redirect(self, redirects: list[tree.Redirect]) -> bool:
        match = _REDIRECT.match(self.text, self.position)
        if match is None or self.angle_starts(match.end() - 1):
            return False
        self.position = match.end()
        self.blanks()
        operator = match[1] or match[2]
        if operator in ("<<", "<<-"):
            word = self.word()
            delimiter = "".join(part.text for part in word if isinstance(part, tree.LiteralText))
            literal = any(isinstance(part, tree.LiteralText) and part.quoted for part in word)
            self.documents.append((delimiter, literal, operator == "<<-", redirects, len(redirects)))
            redirects.append(tree.Redirect("<<", ()))
        else:
            descriptor = match[0][: -len(operator)]
            other = descriptor if descriptor not in ("0", "1") else ""
            redirects.append(tree.Redirect(other + operator, self.word()))
        return True
