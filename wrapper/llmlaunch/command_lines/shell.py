"""Scripts of bash and sbatch read without executing anything: which commands they would start, with which words.

A shell that runs no program: it assigns, expands, decides and loops as bash does, and writes the programs down that
bash would start. Where only the run would show how a condition ends, the first branch that does not end the script is
taken, and a note says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any, ClassVar

from llmlaunch.command_lines import shell_tree as tree
from llmlaunch.command_lines.command import Unset, is_optional
from llmlaunch.command_lines.sbatch import sbatch_environment, sbatch_options
from llmlaunch.command_lines.shell_builtins import BUILTINS, Left, declare
from llmlaunch.command_lines.shell_printers import PRINTERS
from llmlaunch.command_lines.shell_state import (
    MOST_TEXT,
    Input,
    ReadingBudget,
    Record,
    ShellCommand,
    State,
    Value,
    has_unset,
    plain,
    reason,
    shown,
    unset_names,
)
from llmlaunch.command_lines.shell_syntax import DECLARATIONS, parse_script
from llmlaunch.command_lines.shell_test import ShellPattern, test_outcome
from llmlaunch.command_lines.shell_word_syntax import ShellSyntaxError
from llmlaunch.command_lines.shell_words import Expander
from llmlaunch.errors import UserError

__all__ = ["Script", "ShellCommand", "read_script"]

DEEPEST = 192
_TOO_DEEP = "its commands are nested too deeply to be read"

Outcome = bool | None


@dataclass(frozen=True)
class Script:
    """What a script would start. `slurm` holds its sbatch options by long names, `environment` what it exports;
    `unset` are the variables that have no value, `notes` what was decided without knowing it. `ended` says where
    reading ended before the last line, and why; None where it did not."""

    name: str
    commands: tuple[ShellCommand, ...]
    slurm: Mapping[str, str | int | bool]
    environment: Mapping[str, str]
    unset: tuple[Unset, ...]
    notes: tuple[str, ...]
    ended: str | None = None


def read_script(
    text: str,
    name: str,
    folder: Path,
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] = {},
    budget: ReadingBudget | None = None,
) -> Script:
    """Return the commands that a script starts.

    `variables` are the environment it runs in, `folder` where it is and where it starts, `budget` what is left of the
    work that a script which starts this one may be. Raises UserError where the text is no script or asks for too much.
    """
    if len(text) > MOST_TEXT:
        raise UserError(f"{name}: is larger than {MOST_TEXT >> 20} MiB, which no launch script is")
    if "\0" in text:
        raise UserError(f"{name}: is no text")
    record = Record(name, budget or ReadingBudget(name))
    try:
        options, notes = sbatch_options(text, lambda: record.budget.spend("words"))
        record.notes.update(dict.fromkeys(f"{name}:{note}" for note in notes))
        start = str(folder.absolute())
        known = sbatch_environment(options) | ({"SLURM_SUBMIT_DIR": start} if options else {}) | dict(variables)
        given = {key: plain(value) for key, value in known.items()}
        places = list(takewhile(given.__contains__, map(str, count(1))))  # those after a gap stay variables
        words = [plain(word) for word in arguments]
        own = words or [given[place] for place in places]
        rest: dict[str, Value] = {key: value for key, value in given.items() if key not in places}
        state = State(record, name, f"{start}/{name}", start, start, given, own, bool(words), rest)
        with suppress(Left):
            _Shell(state).read(plain(text))
        environment = state.environment()
    except RecursionError:
        raise UserError(f"{name}: {_TOO_DEEP}") from None
    unset = tuple(record.unset.values())
    return Script(name, tuple(record.commands), options, environment, unset, tuple(record.notes), record.ended)


class _Shell:
    def __init__(self, state: State) -> None:
        self.state = state
        self.words = Expander(state, _output)

    def read(self, text: str, first_line: int = 1) -> None:
        """Run all that a text holds; what follows an error of syntax is noted and left."""
        self.state.record.budget.spend("parsed_characters", len(text))
        try:
            block = parse_script(text, first_line, lambda: self.state.record.budget.spend("words"))
        except ShellSyntaxError as error:
            self.state.note(error.line, f"what follows is not read: {error}")
            block = error.before
        self.run(block)

    def run(self, node: tree.Node) -> Outcome:
        """Run a command and return whether it succeeds, None where that is unknown."""
        state = self.state
        state.record.budget.spend("commands")
        state.depth += 1
        if state.depth > DEEPEST:
            raise UserError(f"{state.record.name}: {_TOO_DEEP}")
        try:
            return self._RUNNERS[type(node)](self, node)
        finally:
            state.depth -= 1

    def block(self, node: tree.Statements) -> Outcome:
        if node.subshell:
            shell = _Shell(self.state.subshell())
            outcome = shell.in_subshell(replace(node, subshell=False))
            self.state.output = shell.state.output
            return outcome
        outcome = True
        with _Redirected(self, node.redirects):
            for statement in node.statements:
                outcome = self.run(statement)
        return outcome

    def in_subshell(self, node: tree.Node) -> Outcome:
        try:
            return self.run(node)
        except Left:
            return None

    def and_or(self, node: tree.AndOr) -> Outcome:
        first, assumed = self.condition(node.left)
        # a program is taken to succeed
        if (first is False) == (node.operator == "&&"):
            return first
        if self.ending(node.right) is not None and (first is None or (assumed and self.refuses(node.right))):
            return self.undecided(node.line, [node.right], node.operator, assumed)
        if first is None and _is_test(node.left):
            return self.undecided(node.line, [node.right], node.operator)
        second = self.because(assumed, node.right)
        return None if first is None and second is True else second

    def pipeline(self, node: tree.Pipeline) -> Outcome:
        if len(node.commands) == 1:
            outcome = self.run(node.commands[0])
        else:
            outcome, given = None, self.state.input
            for command in node.commands[:-1]:
                shell = _Shell(self.state.subshell())
                shell.state.input, shell.state.output = given, []
                shell.in_subshell(command)
                given = None if shell.state.output is None else Input("".join(shell.state.output))
            shell = _Shell(self.state.subshell())
            shell.state.input = given
            outcome = shell.in_subshell(node.commands[-1])
            self.state.output = shell.state.output
        return outcome if outcome is None or not node.negated else not outcome

    # conditions and loops

    def condition(self, node: tree.Node) -> tuple[Outcome, list[str]]:
        """Run a condition and return with its outcome which variables it counted as empty."""
        record = self.state.record
        before, record.assumed = record.assumed, {}
        try:
            return self.run(node), list(record.assumed)
        finally:
            record.assumed = before | record.assumed

    def because(self, assumed: Iterable[str], node: tree.Node) -> Outcome:
        """Run a branch that is taken because these variables are empty."""
        reasons = self.state.record.reasons
        reasons.append(assumed)
        try:
            return self.run(node)
        finally:
            reasons.pop()

    def if_(self, node: tree.If) -> Outcome:
        bodies = [body for _, body in node.branches] + ([node.otherwise] if node.otherwise else [])
        assumed: list[str] = []
        for place, (condition, body) in enumerate(node.branches):
            outcome, names = self.condition(condition)
            assumed += names
            if outcome is None:
                return self.undecided(node.line, bodies[place:], "if")
            if outcome:
                return self.taken(body, bodies, node.line, "if", assumed)
        return self.taken(node.otherwise, bodies, node.line, "if", assumed) if node.otherwise is not None else True

    def taken(
        self, body: tree.Statements, bodies: Sequence[tree.Statements], line: int, kind: str, assumed: Sequence[str]
    ) -> Outcome:
        """Run a branch. One that only complains of a missing value and ends the script is left for another one."""
        if assumed and self.refuses(body):
            return self.undecided(line, bodies, kind, assumed)
        return self.because(assumed, body)

    def undecided(self, line: int, bodies: Sequence[tree.Node], kind: str, assumed: Sequence[str] = ()) -> Outcome:
        """Run the first body that does not end the script, and note which one that is."""
        last = next((end for body in bodies if (end := self.ending(body)) is not None), None)
        if assumed and last is not None:
            self.state.ends(_written(last), last.line, reason(assumed, self.state.variables), goes_on=True)
        body = next((body for body in bodies if self.ending(body) is None), None)
        places = ", ".join(str(line_of(body, line)) for body in bodies)
        if body is None:
            if not assumed and (len(bodies) != 1 or not isinstance(bodies[0], tree.Statements) or bodies[0].statements):
                self.state.note(line, f"{kind}: only the run shows whether it ends the script; taken as if it does not")
            return None
        place = line_of(body, line)
        if len(bodies) > 1:
            self.state.note(
                line, f"{kind}: only the run shows which branch it takes (lines {places}); read: line {place}"
            )
        else:
            self.state.note(line, f"{kind}: only the run shows whether line {places} is taken; read as if it is")
        return self.run(body)

    def ending(self, node: tree.Node) -> tree.Simple | None:
        """Return the command with which a branch leaves the script or a function; None where it goes on."""
        if isinstance(node, tree.Statements):
            return self.ending(node.statements[-1]) if node.statements and not node.subshell else None
        if not isinstance(node, tree.Simple):
            return None
        name = _name(node)
        if name in self.state.functions:
            body = self.state.functions[name]
            return self.ending(body) if isinstance(body, tree.Statements) and body.statements[-1:] != (node,) else None
        return node if name in ("exit", "return") else None

    def refuses(self, node: tree.Node) -> bool:
        """Return whether a branch ends the script and starts no program before."""
        statements = node.statements if isinstance(node, tree.Statements) else (node,)
        harmless = {"", *BUILTINS, *PRINTERS, *self.state.functions}
        return self.ending(node) is not None and all(
            isinstance(each, tree.Simple) and _name(each) in harmless for each in statements
        )

    def case(self, node: tree.CaseCommand) -> Outcome:
        before, self.state.record.assumed = self.state.record.assumed, {}
        text = self.state.known(self.words.text(node.word), node.line)
        assumed = list(self.state.record.assumed)
        self.state.record.assumed = before | self.state.record.assumed
        bodies = [item.body for item in node.items]
        if text is None:
            return self.undecided(node.line, bodies, "case")
        outcome: Outcome = True
        falls = False
        for item in node.items:
            if falls or any(
                ShellPattern(self.words.pattern(pattern), self.state.spend).matches(text) for pattern in item.patterns
            ):
                outcome = self.taken(item.body, bodies, node.line, "case", assumed)
                falls = item.ending == ";&"
                if item.ending == ";;":
                    break
        return outcome

    def for_(self, node: tree.For) -> Outcome:
        words = self.words.fields(node.words) if node.words is not None else list(self.state.arguments)
        for word in words:
            self.state.assign(node.name, word)
            if not self.round(node.body):
                break
        return None

    def round(self, body: tree.Statements) -> bool:
        """Run the body of a loop once and return whether the loop goes on."""
        self.state.loops += 1
        try:
            self.run(body)
        except Left as left:
            if left.command not in ("break", "continue"):
                raise
            if left.levels > 1 and self.state.loops > 1:
                raise Left(left.command, left.levels - 1) from None
            return left.command == "continue"
        finally:
            self.state.loops -= 1
        return True

    def counting_for(self, node: tree.CountingFor) -> Outcome:
        first, condition, following = node.expressions
        self.words.arithmetic(first, node.line)
        while True:
            outcome = self.words.arithmetic(condition, node.line, True) if condition else "1"
            if outcome == "0" or not self.round(node.body) or has_unset(outcome):
                return None
            self.words.arithmetic(following, node.line)

    def while_(self, node: tree.While) -> Outcome:
        while True:
            state = self.state
            before = state.changes, len(state.arguments), state.input and state.input.position
            outcome = self.run(node.condition)
            if (outcome is not None and outcome == node.until) or not self.round(node.body) or outcome is None:
                return None
            if before == (state.changes, len(state.arguments), state.input and state.input.position):
                return None  # it would go on for ever, or until a program says otherwise

    def conditional(self, node: tree.Conditional) -> Outcome:
        if node.arithmetic:
            number = self.words.arithmetic(node.words[0], node.line, True)
            return None if has_unset(number) else number != "0"
        words: list[str] = []
        for place, word in enumerate(node.words):
            before = node.words[place - 1] if place > 1 else ()
            is_pattern = before in [(tree.LiteralText(sign),) for sign in ("=", "==", "!=", "=~")]
            words.append(self.words.pattern(word) if is_pattern else self.words.text(word))
        return test_outcome(self.state, words, node.line, patterns=True)

    def function(self, node: tree.Function) -> Outcome:
        self.state.functions[node.name] = node.body
        return True

    # simple commands

    def simple(self, node: tree.Simple) -> Outcome:
        words = [word for word in node.words if not isinstance(word, tree.Assignment)]
        fields = self.words.fields(words)
        state = self.state
        if not fields:
            for assignment in node.assignments:
                self.words.assign(assignment, node.line)
            with _Redirected(self, node.redirects):
                return True
        names = {state.target(assignment.name) for assignment in node.assignments}
        before = {name: state.variables.get(name) for name in names}
        temporary = names - state.exported
        try:
            with _Redirected(self, node.redirects):  # before the assignments, as bash does
                for assignment in node.assignments:
                    self.words.assign(assignment, node.line)
                for name in names:
                    state.export(name)
                return self.command(node, fields)
        finally:
            for name, value in before.items():
                state.restore(name, value)
            for name in temporary:
                state.unexport(name)

    def command(self, node: tree.Simple, fields: list[str]) -> Outcome:
        name, arguments, state = fields[0], fields[1:], self.state
        if name in ("command", "builtin") and arguments and arguments[0] in (*BUILTINS, *PRINTERS):
            name, arguments = arguments[0], arguments[1:]
        elif name in ("type", "hash", "which") or (name == "command" and arguments[:1] in (["-v"], ["-V"])):
            self.print_(None)
            return True if arguments[-1:] and arguments[-1] in state.functions else None
        if name in DECLARATIONS:
            return declare(self, node, name, arguments)
        if name in state.functions:
            return self.call(state.functions[name], arguments)
        if name in BUILTINS:
            return BUILTINS[name](self, arguments, node.line)
        if name == "exec" and not arguments:
            return True
        if name in PRINTERS:
            return self.print_(PRINTERS[name](state, arguments))
        self.start(fields, node.line)
        if name == "exec" and arguments and not state.is_subshell:
            state.ends(f"exec {shown(arguments[0])}", node.line, "")
            raise Left("exit")
        return None

    def start(self, fields: Sequence[str], line: int) -> None:
        """Write down a program that bash would start."""
        self.print_(None)
        state = self.state
        words = tuple(map(shown, fields))
        for before, word, field in zip(words, words[1:], fields[1:], strict=False):
            if is_optional(word) and state.is_null(field) and not before.startswith("-"):
                names = ", ".join(unset_names(field))
                state.note(line, f"{names} is not set: {word} disappears, as in bash, where no value is needed")
        state.record.commands.append(
            ShellCommand(
                words, state.environment(), Path(shown(state.folder)), line, state.script, state.written_files(),
                state.given, state.record.budget,
            )
        )  # fmt: skip

    def print_(self, text: str | None) -> Outcome:
        output = self.state.output
        if text is None:
            self.state.output = None
            return None
        if output is not None:
            self.state.spend(len(text))
            output.append(text)
        return True

    def call(self, body: tree.Node, arguments: list[str]) -> Outcome:
        state = self.state
        before = state.arguments, state.has_arguments, state.loops
        state.arguments, state.has_arguments, state.loops = arguments, True, 0
        state.calls.append({})
        try:
            return self.run(body)
        except Left as left:
            if left.command != "return":
                raise
            return None if left.levels < 0 else left.levels == 0
        finally:
            for name, value in state.calls.pop().items():
                state.references.pop(name, None)
                state.restore(name, value)
            state.arguments, state.has_arguments, state.loops = before

    _RUNNERS: ClassVar[dict[type, Callable[[Any, Any], Outcome]]] = {
        tree.Simple: simple, tree.Pipeline: pipeline, tree.AndOr: and_or, tree.Statements: block, tree.If: if_,
        tree.For: for_, tree.CountingFor: counting_for, tree.While: while_, tree.CaseCommand: case,
        tree.Function: function, tree.Conditional: conditional,
    }  # fmt: skip


@contextmanager
def _Redirected(shell: _Shell, redirects: Sequence[tree.Redirect]) -> Any:
    """The redirections of a command: here-documents as its input, files that it writes."""
    state = shell.state
    before = state.input, state.output
    target: tuple[str, bool] | None = None
    for redirect in redirects:
        operator, text = redirect.operator, shell.words.text(redirect.target)
        if operator in ("<<", "<<<"):
            state.input = Input(text + ("\n" if operator == "<<<" else ""))
        elif operator == "<":
            content = state.text_of(text)
            state.input = None if content is None else Input(content)
        elif operator in (">", ">>", ">|", "&>", "&>>") or (operator == ">&" and not text.isdecimal()):
            target = text, operator in (">>", "&>>")
        elif operator == ">&" and text == "2":
            target = "/dev/stderr", True
    if target is not None:
        state.output = []
    try:
        yield
    finally:
        output, state.input = state.output, before[0]
        if target is not None:
            state.output = before[1]
            if output is not None:
                state.write(target[0], "".join(output), target[1])


def _output(state: State, body: tree.Statements) -> str | None:
    """Return what commands print, None where a program would print it."""
    only = body.statements[0] if len(body.statements) == 1 else None
    shell = _Shell(state.subshell())
    if isinstance(only, tree.Simple) and not only.words and [each.operator for each in only.redirects] == ["<"]:
        return state.text_of(shell.words.text(only.redirects[0].target))
    shell.state.output = []
    before = len(state.record.commands)
    shell.in_subshell(body)
    del state.record.commands[before:]  # they would be started to print something, not to train
    return None if shell.state.output is None else "".join(shell.state.output)


def _name(node: tree.Simple) -> str:
    """Return the name of a command as it is written, "" for assignments alone."""
    return _written(node).partition(" ")[0]


def _written(node: tree.Simple) -> str:
    words = [word for word in node.words if isinstance(word, tuple)]
    return " ".join("".join(getattr(part, "text", "…") for part in word) for word in words)


def _is_test(node: tree.Node) -> bool:
    return isinstance(node, tree.Conditional) or (isinstance(node, tree.Simple) and _name(node) in ("[", "test"))


def line_of(node: tree.Node, otherwise: int) -> int:
    """Return the line where a command starts."""
    if isinstance(node, tree.Statements):
        return line_of(node.statements[0], otherwise) if node.statements else otherwise
    return getattr(node, "line", otherwise)
