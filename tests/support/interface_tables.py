"""References made from the code for the docs: docs/commands.md from the command line, docs/python-reference.md from the
public Python interface. `make docs-tables` writes both; tests keep them equal to the code."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import llmlaunch
from llmlaunch.cli.main import COMMANDS, load_command

DOCS = Path(__file__).parents[2] / "docs"

EXIT_CODES = {
    0: "safe, or done (`diff`: no difference)",
    1: "a run that was followed or watched did not succeed (`diff`: a difference), a result could not be written, or a "
    "bug of llmlaunch, with a traceback and what to report",
    2: "a mistake in the recipe or command, or a launch that cannot work",
    3: "no layout is safe, none is within the budget, or the estimate contradicts itself (a bug to report)",
    4: "the scheduler refused",
    5: "no verdict: what decides memory was not read",
    130: "Ctrl-C",
    141: "nobody reads the result any more (`| head`)",
}


def command_reference() -> str:
    """Every command with its arguments and options, as a Markdown page."""
    context = click.Context(click.Group(), info_name="llmlaunch")
    chapters = (part for name in COMMANDS for part in _command(load_command(name), name, context))
    return "\n".join(
        [
            "# Commands",
            "",
            "Made from the program itself (`make docs-tables`); `llmlaunch COMMAND --help` prints the same.",
            "",
            "## Exit codes",
            "| code | meaning |",
            "|---|---|",
            *(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()),
            "",
            "Where several apply, 2 comes before 5 and 5 before 3. A job has exit codes of its own ([the run",
            "directory](run-directory.md#the-programs)).",
            "",
            *chapters,
        ]
    )


def _command(command: click.Command, name: str, parent: click.Context, level: int = 2) -> Iterator[str]:
    context = click.Context(command, info_name=name, parent=parent)
    words = " ".join(command.collect_usage_pieces(context))
    yield f"{'#' * level} llmlaunch {f'{parent.info_name} {name}' if level > 2 else name}\n"
    yield f"```text\n{context.command_path} {words}\n```\n"
    if command.help:
        yield _plain(command.help) + "\n"
    records = [option.get_help_record(context) for option in command.get_params(context)]
    options = [record for record in records if record and record[1] and "--help" not in record[0]]
    if options:
        yield "| option | meaning |\n|---|---|"
        yield from (f"| `{_cell(flags)}` | {_cell(_plain(about))} |" for flags, about in options)
        yield ""
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            subcommand = command.get_command(context, inner)
            assert subcommand is not None
            yield from _command(subcommand, inner, context, level + 1)


def _plain(text: str) -> str:
    """Help or a docstring as paragraphs of Markdown; what looks like HTML or emphasis stays text outside of `code`.
    Lines that the help keeps apart (click's backspace) are a block of code."""
    parts = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(_lines(part) if part.startswith("\b") else _paragraph(part) for part in parts)


def _lines(part: str) -> str:
    return "```text\n" + "\n".join(line.rstrip() for line in part.strip("\b\n").split("\n")) + "\n```"


def _paragraph(part: str) -> str:
    pieces = " ".join(part.split()).split("`")
    pieces[::2] = [piece.replace("<", "&lt;").replace("*", r"\*") for piece in pieces[::2]]
    return "`".join(pieces)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def python_reference() -> str:
    """Every name of `llmlaunch.__all__` with its signature and docstring, as a Markdown page."""
    values = {name: getattr(llmlaunch, name) for name in llmlaunch.__all__}
    functions = {name: value for name, value in values.items() if inspect.isfunction(value)}
    errors = {name: value for name, value in values.items() if inspect.isclass(value) and issubclass(value, Exception)}
    objects = {name: value for name, value in values.items() if name not in functions and name not in errors}
    return "\n".join(
        [
            "# Python interface",
            "",
            "Made from the docstrings of `import llmlaunch` (`make docs-tables`); [From Python](python.md) uses it.",
            "",
            *(
                part
                for chapter in (functions, objects, errors)
                for name in chapter
                for part in _entry(name, chapter[name])
            ),
        ]
    )


def _entry(name: str, value: Any) -> Iterator[str]:
    yield f"## {name}\n"
    if inspect.isfunction(value):
        yield f"```text\n{name}{_signature(value)}\n```\n"
    yield _plain(_docstring(value)) + "\n"
    if not inspect.isclass(value) or issubclass(value, Exception):
        return
    if dataclasses.is_dataclass(value):
        fields = [f"| `{field.name}` | `{_cell(_annotation(field.type))}` |" for field in dataclasses.fields(value)]
        yield "| attribute | type |\n|---|---|\n" + "\n".join(line for line in fields if "`_" not in line) + "\n"
    members = list(_members(value))
    if members:
        yield "| member | meaning |\n|---|---|\n" + "\n".join(members) + "\n"


def _members(value: Any) -> Iterator[str]:
    for member, function in vars(value).items():
        documented = function.fget if isinstance(function, property) else function
        if member.startswith("_") or not inspect.isfunction(documented) or not documented.__doc__:
            continue
        arguments = "" if isinstance(function, property) else _signature(documented)
        yield f"| `{_cell(member + arguments)}` | {_cell(_plain(_docstring(documented)))} |"


def _signature(function: Any) -> str:
    text = re.sub(r"<function \w+ at 0x\w+>", "...", str(inspect.signature(function)))
    text = text.replace("(self, ", "(").replace("(self)", "()").replace("'", "")
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text)


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _docstring(value: Any) -> str:
    return inspect.getdoc(value) or ""


def main() -> None:
    """Write both pages."""
    (DOCS / "commands.md").write_text(command_reference(), encoding="utf-8")
    (DOCS / "python-reference.md").write_text(python_reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
