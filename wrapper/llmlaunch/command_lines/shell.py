"""Scripts of bash and sbatch read without executing anything: which commands they would start, with which words.

A shell that runs no program: it assigns, expands, decides and loops as bash does, and writes the programs down that
bash would start. Where only the run would show how a condition ends, the first branch that does not end the script is
taken, and a note says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from llmlaunch.command_lines.command import Unset, is_optional
from llmlaunch.command_lines.sbatch import sbatch_environment, sbatch_options
from llmlaunch.command_lines.shell_builtins import BUILTINS, PRINTERS, Left
from llmlaunch.command_lines.shell_state import (
    MOST_TEXT,
    Record,
    ShellCommand,
    State,
    has_unset,
    plain,
    shown,
    unset_names,
)
from llmlaunch.command_lines.shell_syntax import DECLARATIONS, parse_script
from llmlaunch.command_lines.shell_test import test_outcome
from llmlaunch.command_lines.shell_tree import (
    AndOr,
    ArithmeticCommand,
    Assignment,
    Block,
    CaseCommand,
    Conditional,
    CountingFor,
    For,
    Function,
    If,
    Node,
    Pipeline,
    Redirect,
    Simple,
    Subshell,
    Substitution,
    While,
    Word,
)
from llmlaunch.command_lines.shell_word_syntax import ShellSyntaxError
from llmlaunch.command_lines.shell_words import Expander, matches
from llmlaunch.errors import UserError
from llmlaunch.rundir.foreign_values import whole_number_in

__all__ = ["Script", "ShellCommand", "read_script"]

DEEPEST = 24
MOST_ROUNDS = 1000

Outcome = bool | None


@dataclass(frozen=True)
class Script:
    """What a script would start. `slurm` holds its sbatch options by long names, `environment` what it exports;
    `unset` are the variables that have no value, `notes` what was decided without knowing it."""

    name: str
    commands: tuple[ShellCommand, ...]
    slurm: Mapping[str, str | int | bool]
    environment: Mapping[str, str]
    unset: tuple[Unset, ...]
    notes: tuple[str, ...]


def read_script(
    text: str,
    name: str,
    folder: Path,
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] = {},
) -> Script:
    """Return the commands that a script starts. `variables` are the environment it runs in, `folder` where it lies and
    where it starts. Raises UserError where the text is no script or asks for too much."""
    if len(text) > MOST_TEXT:
        raise UserError(f"{name}: is larger than {MOST_TEXT >> 20} MiB, which no launch script is")
    if "\0" in text:
        raise UserError(f"{name}: is no text")
    options, notes = sbatch_options(text, lambda: None)
    record = Record(name)
    record.notes.update(dict.fromkeys(f"{name}:{note}" for note in notes))
    start = str(folder.absolute())
    given = {key: plain(value) for key, value in (sbatch_environment(options) | dict(variables)).items()}
    state = State(record, name, f"{start}/{name}", start, given, [plain(word) for word in arguments], bool(arguments))
    shell = _Shell(state)
    try:
        shell.read(plain(text))
    except Left:
        pass
    except RecursionError:
        raise UserError(f"{name}: its commands are nested too deeply to be read") from None
    unset = tuple(record.unset.values())
    return Script(name, tuple(record.commands), options, state.environment(), unset, tuple(record.notes))


class _Shell:
    def __init__(self, state: State) -> None:
        self.state = state
        self.words = Expander(state, _output)

    def read(self, text: str, first_line: int = 1) -> None:
        """Run all that a text holds; what follows an error of syntax is noted and left."""
        try:
            block = parse_script(text, first_line)
        except ShellSyntaxError as error:
            self.state.note(error.line, f"what follows is not read: {error}")
            block = error.before
        self.run(block)

    def run(self, node: Node) -> Outcome:
        """Run a command and return whether it succeeds, None where that is unknown."""
        state = self.state
        state.record.step()
        state.depth += 1
        if state.depth > 8 * DEEPEST:
            raise UserError(f"{state.record.name}: its commands are nested too deeply to be read")
        try:
            return self._RUNNERS[type(node)](self, node)
        finally:
            state.depth -= 1

    def block(self, node: Block) -> Outcome:
        with_redirects = _Redirected(self, node.redirects)
        outcome: Outcome = True
        with with_redirects:
            for statement in node.statements:
                outcome = self.run(statement)
        return outcome

    def and_or(self, node: AndOr) -> Outcome:
        first = self.run(node.left)
        # a program is taken to succeed
        if (first is False) == (node.operator == "&&"):
            return first
        second = self.run(node.right)
        return None if first is None and second is True else second

    def pipeline(self, node: Pipeline) -> Outcome:
        if len(node.commands) == 1:
            outcome = self.run(node.commands[0])
        else:
            outcome, text = None, self.state.input
            for place, command in enumerate(node.commands):
                shell = _Shell(self.state.subshell())
                shell.state.input = text
                last = place == len(node.commands) - 1
                if not last:
                    shell.state.output = []
                outcome = shell.in_subshell(command)
                text = None if shell.state.output is None or last else "".join(shell.state.output)
                if last and shell.state.output is None:
                    self.state.output = None
        return outcome if outcome is None or not node.negated else not outcome

    def subshell(self, node: Subshell) -> Outcome:
        shell = _Shell(self.state.subshell())
        outcome = shell.in_subshell(node.body)
        self.state.output = shell.state.output
        return outcome

    def in_subshell(self, node: Node) -> Outcome:
        try:
            return self.run(node)
        except Left:
            return None

    # conditions and loops

    def if_(self, node: If) -> Outcome:
        bodies = [(line_of(condition, node.line), body) for condition, body in node.branches]
        for place, (condition, body) in enumerate(node.branches):
            outcome = self.run(condition)
            if outcome:
                return self.run(body)
            if outcome is None:
                open_bodies = [body for _, body in bodies[place:]] + ([node.otherwise] if node.otherwise else [])
                return self.undecided(node.line, open_bodies, "if")
        return self.run(node.otherwise) if node.otherwise is not None else True

    def undecided(self, line: int, bodies: Sequence[Block], kind: str) -> Outcome:
        """Run the first body that does not end the script, and note which one that is."""
        body = next((body for body in bodies if not _ends(body)), None)
        places = ", ".join(str(line_of(body, line)) for body in bodies)
        if body is None:
            if len(bodies) != 1 or bodies[0].statements:
                self.state.note(line, f"{kind}: only the run shows whether it ends the script; taken as if it does not")
            return None
        if len(bodies) > 1:
            place = line_of(body, line)
            self.state.note(
                line, f"{kind}: only the run shows which branch it takes (lines {places}); read: line {place}"
            )
        else:
            self.state.note(line, f"{kind}: only the run shows whether line {places} is taken; read as if it is")
        return self.run(body)

    def case(self, node: CaseCommand) -> Outcome:
        text = self.words.text(node.word)
        if has_unset(text):
            return self.undecided(node.line, [body for _, body in node.items], "case")
        for patterns, body in node.items:
            if any(matches(self.words.text(pattern), text) for pattern in patterns):
                return self.run(body)
        return True

    def for_(self, node: For) -> Outcome:
        words = self.words.fields(node.words) if node.words is not None else list(self.state.arguments)
        for word in words:
            self.state.assign(node.name, word)
            if not self.round(node.body):
                break
        return None

    def round(self, body: Block) -> bool:
        """Run the body of a loop once and return whether the loop goes on."""
        try:
            self.run(body)
        except Left as left:
            if left.command not in ("break", "continue"):
                raise
            if left.levels > 1:
                raise Left(left.command, left.levels - 1) from None
            return left.command == "continue"
        return True

    def counting_for(self, node: CountingFor) -> Outcome:
        first, condition, following = node.expressions
        self.words.arithmetic(first, node.line)
        for _ in range(MOST_ROUNDS):
            outcome = self.words.arithmetic(condition, node.line) if condition else "1"
            if outcome == "0" or not self.round(node.body) or has_unset(outcome):
                break
            self.words.arithmetic(following, node.line)
        return None

    def while_(self, node: While) -> Outcome:
        for _ in range(MOST_ROUNDS):
            before = dict(self.state.variables), list(self.state.arguments)
            outcome = self.run(node.condition)
            asks = any(
                whole_number_in(name) is not None or name == "number_of_arguments" for name in self.state.record.unset
            )
            if outcome is None and asks and not self.state.has_arguments:
                break  # it would read the arguments of the script, and there are none
            if outcome is not None and outcome == node.until:
                break
            if not self.round(node.body) or outcome is None:
                break
            if before == (self.state.variables, self.state.arguments):
                break  # it would go on for ever, or until a program says otherwise
        return None

    def arithmetic_command(self, node: ArithmeticCommand) -> Outcome:
        number = self.words.arithmetic(node.expression, node.line)
        return None if has_unset(number) else number != "0"

    def conditional(self, node: Conditional) -> Outcome:
        return test_outcome(self.state, [self.words.text(word) for word in node.words], node.line)

    def function(self, node: Function) -> Outcome:
        self.state.functions[node.name] = node.body
        return True

    # simple commands

    def simple(self, node: Simple) -> Outcome:
        words = [word for word in node.words if not isinstance(word, Assignment)]
        fields = self.words.fields(words)
        if not fields:
            for assignment in node.assignments:
                self.assign(assignment, node.line)
            with _Redirected(self, node.redirects):
                return True
        before = dict(self.state.variables), set(self.state.exported)
        for assignment in node.assignments:
            self.assign(assignment, node.line)
            self.state.exported.add(assignment.name)
        with _Redirected(self, node.redirects):
            outcome = self.command(node, fields)
        if node.assignments:
            for assignment in node.assignments:
                name = assignment.name
                self.state.variables.pop(name, None)
                self.state.variables.update({name: before[0][name]} if name in before[0] else {})
            temporary = {assignment.name for assignment in node.assignments} - before[1]
            self.state.exported -= temporary
        return outcome

    def assign(self, assignment: Assignment, line: int) -> None:
        name, state = assignment.name, self.state
        current = state.variables.get(name, state.given.get(name, ""))
        if assignment.array:
            entries = self.array(assignment)
            if assignment.append and not isinstance(entries, dict):
                entries = [*(current if isinstance(current, list) else [current] if current else []), *entries]
            return state.assign(name, entries)
        word: Word = assignment.value  # type: ignore[assignment]
        if len(word) == 1 and isinstance(word[0], Substitution):
            value = self.words.substitution(word[0], name)
        else:
            value = self.words.text(word)
        if assignment.index is not None:
            return self.assign_entry(name, current, self.words.text(assignment.index), value)
        if assignment.append and isinstance(current, list):
            return state.assign(name, [current[0] + value if current else value, *current[1:]])
        if assignment.append and isinstance(current, str):
            value = current + value
        return state.assign(name, value)

    def array(self, assignment: Assignment) -> list[str] | dict[str, str]:
        entries = self.words.fields(assignment.value)  # type: ignore[arg-type]
        keyed = [entry[1:].partition("]=") for entry in entries]
        if entries and all(
            entry.startswith("[") and separator for entry, (_, separator, _) in zip(entries, keyed, strict=True)
        ):
            return {key: value for key, _, value in keyed}
        return entries

    def assign_entry(self, name: str, current: Any, index: str, value: str) -> None:
        position = whole_number_in(index)
        if isinstance(current, dict) or position is None:
            entries = dict(current) if isinstance(current, dict) else {}
            return self.state.assign(name, entries | {index: value})
        array = list(current) if isinstance(current, list) else [current] if current else []
        place = min(position, MOST_ROUNDS)
        array.extend([""] * (place + 1 - len(array)))
        array[place] = value
        return self.state.assign(name, array)

    def command(self, node: Simple, fields: list[str]) -> Outcome:
        name, arguments = fields[0], fields[1:]
        if name in DECLARATIONS:
            return self.declare(node, name, arguments)
        if name in self.state.functions:
            return self.call(self.state.functions[name], arguments)
        if name in BUILTINS:
            return BUILTINS[name](self, arguments, node.line)
        if name in PRINTERS:
            text = PRINTERS[name](self.state, arguments)
            return self.print_(text)
        self.print_(None)
        state = self.state
        words = tuple(map(shown, fields))
        for before, word, field in zip(words, words[1:], fields[1:], strict=False):
            if is_optional(word) and state.is_null(field) and not before.startswith("-"):
                names = ", ".join(unset_names(field))
                state.note(node.line, f"{names} is not set: {word} disappears, as in bash, where no value is needed")
        folder = Path(shown(state.folder))
        texts = {path: shown(text) for path, text in state.files.items()}
        files = {shown(path): texts[place] for path, place in state.written_as.items()}
        files |= {shown(path): text for path, text in texts.items()}
        state.record.commands.append(
            ShellCommand(words, state.environment(), folder, node.line, state.script, files, state.given)
        )
        return None

    def print_(self, text: str | None) -> Outcome:
        output = self.state.output
        if text is None:
            self.state.output = None
            return None
        if output is not None:
            output.append(self.state.record.produce(text))
        return True

    def declare(self, node: Simple, name: str, arguments: list[str]) -> Outcome:
        for assignment in node.words:
            if isinstance(assignment, Assignment):
                self.assign(assignment, node.line)
        names = [word for word in arguments if not word.startswith("-")]
        names += [word.name for word in node.words if isinstance(word, Assignment)]
        if "-A" in arguments:
            for word in names:
                if not isinstance(self.state.variables.get(word), dict):
                    self.state.assign(word, {})
        if name == "export" or any(word.startswith("-") and "x" in word for word in arguments):
            for word in names:
                key, separator, value = word.partition("=")
                if separator:
                    self.state.assign(key, value)
                self.state.exported.add(key)
        return True

    def call(self, body: Node, arguments: list[str]) -> Outcome:
        state = self.state
        before = state.arguments, state.has_arguments
        state.arguments, state.has_arguments = arguments, True
        try:
            return self.run(body)
        except Left as left:
            if left.command != "return":
                raise
            return None
        finally:
            state.arguments, state.has_arguments = before

    def write(self, path: str, text: str, append: bool) -> None:
        place = self.state.resolved(path)
        before = self.state.files.get(place, "") if append else ""
        if not place.startswith("/dev/"):
            self.state.files[place] = self.state.record.produce(before + text)
            self.state.written_as[path] = place

    _RUNNERS: ClassVar[dict[type, Callable[[Any, Any], Outcome]]] = {
        Simple: simple, Pipeline: pipeline, AndOr: and_or, Block: block, Subshell: subshell, If: if_, For: for_,
        CountingFor: counting_for, While: while_, CaseCommand: case, Function: function,
        ArithmeticCommand: arithmetic_command, Conditional: conditional,
    }  # fmt: skip


class _Redirected:
    """The redirections of a command: here-documents as its input, files that it writes."""

    def __init__(self, shell: _Shell, redirects: Sequence[Redirect]) -> None:
        self.shell, self.redirects = shell, redirects

    def __enter__(self) -> None:
        state = self.shell.state
        self.before = state.input, state.output
        self.target: tuple[str, bool] | None = None
        for redirect in self.redirects:
            if redirect.operator == "<<":
                state.input = self.shell.words.text(redirect.target)
            elif redirect.operator == "<<<":
                state.input = self.shell.words.text(redirect.target) + "\n"
            elif redirect.operator == "<":
                state.input = state.text_of(self.shell.words.text(redirect.target))
            elif redirect.operator in (">", ">>", ">|", "&>", "&>>"):
                path = self.shell.words.text(redirect.target)
                self.target = path, redirect.operator in (">>", "&>>")
        if self.target is not None:
            state.output = []

    def __exit__(self, *_: object) -> None:
        state = self.shell.state
        output = state.output
        state.input = self.before[0]
        if self.target is not None:
            state.output = self.before[1]
            if output is not None:
                self.shell.write(self.target[0], "".join(output), self.target[1])


def _output(state: State, body: Block) -> str | None:
    """Return what commands print, None where a program would print it."""
    shell = _Shell(state.subshell())
    shell.state.output = []
    before = len(state.record.commands)
    shell.in_subshell(body)
    del state.record.commands[before:]  # they would be started to print something, not to train
    return None if shell.state.output is None else "".join(shell.state.output)


def _ends(body: Block) -> bool:
    last = body.statements[-1] if body.statements else None
    if isinstance(last, Block):
        return _ends(last)
    if not isinstance(last, Simple) or not last.words:
        return False
    return [getattr(part, "text", "") for part in last.words[0]] in (["exit"], ["return"])  # type: ignore[union-attr]


def line_of(node: Node, otherwise: int) -> int:
    """Return the line where a command starts."""
    if isinstance(node, Block):
        return line_of(node.statements[0], otherwise) if node.statements else otherwise
    if isinstance(node, AndOr):
        return line_of(node.left, otherwise)
    return getattr(node, "line", otherwise)
