"""`llmlaunch init --from FILE`: a recipe from the script or settings file that somebody already has."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from llmlaunch.cli.output import say
from llmlaunch.cli.planning import ScriptInput
from llmlaunch.command_lines.recipe_draft import LEFT_OUT
from llmlaunch.imports.recipe_file import RecipeSource, read_with_settings, recipe_text
from llmlaunch.rundir.values import counted


def recipe_from_script(
    path: Path, arguments: Sequence[str], settings: Sequence[str], cluster: str | None, number: int | None
) -> tuple[str, str]:
    """Return a recipe's name and text, and say on stderr what was not read of the file."""
    source = read_with_settings(path, settings, arguments, number, cluster)
    if source.unset and sys.stdin.isatty() and sys.stderr.isatty():
        asked = _ask(source)
        source = read_with_settings(path, (*settings, *asked), arguments, number, cluster) if asked else source
    names = [key.partition("=")[0] for key in source.keys]
    given = dict(key.split("=", 1) for key in source.keys)
    name = given.get("name") or str(source.reading.document["name"])
    text, notes = recipe_text(source, Path(f"{name}.yaml"), cluster)
    _say_what_was_read(source, number, names)
    for note in notes:
        say(f"note: {note}", err=True)
    return name, text


def recipe_beside(path: Path, overrides: Sequence[str], script: ScriptInput) -> tuple[Path, str]:
    """Return where the recipe of a script lies beside it, and its text; say on stderr how it differs from the script.
    `overrides` are `KEY=VALUE` words for the recipe."""
    name, text = recipe_from_script(path, (), (*script.settings, *overrides), script.cluster, script.number)
    return path.parent / f"{name}.yaml", text


def _ask(source: RecipeSource) -> list[str]:
    """Ask for the variables without a value, and return the settings; an empty answer leaves one as it is."""
    values = []
    for unset in source.unset:
        question = f"{source.path}:{unset.line}: ${unset.name} has no value here; value (Enter to leave it out)"
        answer = click.prompt(question, default="", show_default=False, err=True)
        if answer:
            values.append(f"{unset.name}={answer}")
    return values


def _say_what_was_read(source: RecipeSource, number: int | None, keys: Sequence[str]) -> None:
    reading = source.reading
    if len(source.trainings) > 1 and number is None:
        say(f"{source.path}: starts {counted(len(source.trainings), 'training')}; the last is read:", err=True)
        for place, training in enumerate(source.trainings, start=1):
            say(f"  --command {place}: {training}", err=True)
    for unread in reading.unread:
        say(f"not read: {' '.join(unread.words)}: {unread.reason}", err=True)
    for note in (*source.notes, *reading.notes):
        say(f"{'warning' if note.startswith(LEFT_OUT) else 'note'}: {note}", err=True)
    for sentence in (each for each in reading.missing if each.partition(":")[0] not in keys):
        say(f"missing: {sentence}", err=True)
    for unset in source.unset:
        say(f"missing: ${unset.name} of {source.path}:{unset.line}; add --set {unset.name}=VALUE", err=True)
    for problem in () if source.command is None else source.command.launch_problems:
        say(f"differs: {source.path}:{problem.line}: {problem.problem}; llmlaunch starts the ranks itself", err=True)
    if reading.not_rendered is not None:
        say(f"note: the recipe can be checked and not submitted: {reading.not_rendered}", err=True)
