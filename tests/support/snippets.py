"""Blocks of code in the documentation, and what each says about how it is checked.

A block names its language: `sh`, `python`, `yaml`, `json`, `diff`, or `text` for output and drawings. A comment above a
block may say more:

    <!-- runs: here -->         its lines are typed in the page's folder, and must succeed
    <!-- runs: here, exit 2 --> ... and the last must end with this exit code
    <!-- runs: slurm -->        the same, where there is a SLURM
    <!-- runs: elsewhere -->    it needs GPUs or a network: its commands are checked, not typed
    <!-- file: NAME -->         it is the file NAME of the page's folder
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from llmlaunch.cli.main import cli

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LANGUAGES = ("text", "sh", "python", "yaml", "json", "diff")


_FENCE = re.compile(r"^( *)```(.*)$")
_NOTE = re.compile(r"^ *<!-- (runs|file): (.*?) -->$")
_PICTURE = re.compile(r"^!\[[^]]*\]\((?:docs/|\.\./)*screens/([a-z0-9-]+)\.svg\)")


@dataclass(frozen=True)
class Snippet:
    """One block of a page. `place` is "here", "slurm", "elsewhere" or "" where nothing is said; `picture` is the name
    of the screen that shows what its last command prints."""

    page: Path
    line: int
    language: str
    text: str
    place: str = ""
    exit_code: int = 0
    file: str = ""
    picture: str = ""

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def snippets_of(page: Path) -> list[Snippet]:
    """Return the blocks of a page, in order."""
    snippets: list[Snippet] = []
    notes: dict[str, str] = {}
    block: tuple[int, str, str, list[str]] | None = None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if block and fence and not fence[2]:
            place, _, code = notes.get("runs", "").partition(", exit ")
            text = "\n".join(block[3]) + "\n"
            snippets.append(Snippet(page, block[0], block[2], text, place, int(code or 0), notes.get("file", "")))
            block, notes = None, {}
        elif block:
            block[3].append(line.removeprefix(block[1]))
        elif fence:
            block = (number, fence[1], fence[2].strip(), [])
        elif note := _NOTE.match(line):
            notes[note[1]] = note[2]
        elif (picture := _PICTURE.match(line)) and snippets:
            snippets[-1] = Snippet(**{**vars(snippets[-1]), "picture": picture[1]})
    return snippets


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each `llmlaunch` command in lines of a shell."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=";&|<>()")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";&|<>()"):
                if "llmlaunch" in words[:4]:
                    yield words[words.index("llmlaunch") + 1 :]
                words = []
            else:
                words.append(word)


def command_mistake(words: list[str]) -> str:
    """Return what the command line refuses of these words, or "": commands, options and the number of arguments."""
    try:
        context = click.Context(cli, info_name="llmlaunch")
        command: click.Command = cli
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            name, *words = words
            inner = command.get_command(context, name)
            if inner is None:
                return f"no command {name}"
            context, command = click.Context(inner, info_name=name, parent=context), inner
        parser = command.make_parser(context)
        context.allow_interspersed_args = command.allow_interspersed_args
        values, rest, _ = parser.parse_args(list(words))
        for parameter in command.get_params(context):
            given = values.get(parameter.name or "")
            if isinstance(parameter.type, click.Choice) and isinstance(given, str):
                parameter.type.convert(given, parameter, context)
        return f"unknown words {rest}" if rest and not command.ignore_unknown_options else ""
    except click.UsageError as mistake:
        return mistake.format_message()


def command_names(words: list[str]) -> tuple[click.Command, click.Context] | None:
    """Return the command that words begin with, or None."""
    context, command = click.Context(cli, info_name="llmlaunch"), cli
    for word in words:
        inner = command.get_command(context, word) if isinstance(command, click.Group) else None
        if inner is None:
            break
        context, command = click.Context(inner, info_name=word, parent=context), inner  # type: ignore[assignment]
    return None if command is cli else (command, context)


def named_options_mistake(text: str) -> str:
    """Return what is wrong with a synopsis or a mention such as `llmlaunch runs [--limit N]`, or ""."""
    text = text.partition("    ")[0]  # what follows a gap is a remark
    words = re.findall(r"[\w-]+", text.partition("llmlaunch ")[2])
    if not words or words[0].startswith("--") or words[0].isupper():
        return ""
    command = command_names(words)
    if command is None:
        return f"no command {words[0]}"
    known = {option for parameter in command[0].get_params(command[1]) for option in parameter.opts}
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text.partition(" -- ")[0]))
    return f"{command[1].info_name} has no {', '.join(sorted(options - known))}" if options - known else ""


def walk(
    page: Path,
    folder: Path,
    places: Sequence[str] = ("here",),
    instead: Mapping[str, str] | None = None,
    **environment: str,
) -> dict[str, str]:
    """Type a page's snippets of these places in a folder, one after the other; return what those printed that have a
    picture, by its name. `instead` has words to type for some of the page's."""
    printed, found = {}, snippets_of(page)
    for old, new in (instead or {}).items():
        assert any(old in snippet.text for snippet in found), f"{page.name} has no {old}"
        found = [replace(snippet, text=snippet.text.replace(old, new)) for snippet in found]
    for snippet in found:
        if snippet.place in places or snippet.file:
            output = type_snippet(snippet, folder, environment)
            if snippet.picture:
                printed[snippet.picture] = output
    return printed


def type_snippet(snippet: Snippet, folder: Path, environment: Mapping[str, str]) -> str:
    """Type a snippet in a folder, or write the file that it is; return what was printed. Another exit code than the
    snippet tells is an error."""
    if snippet.file:
        (folder / snippet.file).write_text(snippet.text, encoding="utf-8")
        return ""
    text = snippet.text
    if snippet.language == "sh":
        text = text.replace("\n$ ", "\n").removeprefix("$ ")
    argv = [sys.executable, "-c", text] if snippet.language == "python" else ["bash", "-euo", "pipefail", "-c", text]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        argv,
        cwd=folder,
        env={**os.environ, "PATH": path, "COLUMNS": "80", "LINES": "24", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == snippet.exit_code, f"{snippet}: exit code {done.returncode}\n{text}\n{done.stdout}"
    assert "Traceback" not in done.stdout, done.stdout
    return done.stdout
