"""`llmlaunch init --from FILE`: a recipe from the script or settings file that somebody already has."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from llmlaunch.cli.output import say
from llmlaunch.command_lines.recipe_draft import LEFT_OUT
from llmlaunch.errors import UserError
from llmlaunch.imports.recipe_file import RecipeSource, read_source, recipe_text
from llmlaunch.rundir.values import counted

__all__ = ["recipe_from_script"]

# of the environment of the person, which the job has, too
OWN_VARIABLES = ("HOME", "USER")
KEYS = ("name", "model", "backend", "cluster", "nodes", "training", "data", "layout", "memory", "tracking", "container")


def recipe_from_script(
    path: Path, arguments: Sequence[str], settings: Sequence[str], cluster: str | None, number: int | None
) -> tuple[str, str]:
    """Return a recipe's name and text, and say on stderr what was not read of the file."""
    values = dict(map(_setting, settings))
    variables = {name: os.environ[name] for name in OWN_VARIABLES if name in os.environ}
    keys = _recipe_keys(values, read_source(path, arguments, variables, number))
    variables |= {name: value for name, value in values.items() if name not in keys}
    source = read_source(path, arguments, variables, number)
    if source.unset and sys.stdin.isatty() and sys.stderr.isatty():
        asked = _ask(source)
        variables |= asked
        source = read_source(path, arguments, variables, number) if asked else source
    name = values["name"] if "name" in keys else str(source.reading.document["name"])
    text, notes = recipe_text(source, Path(f"{name}.yaml"), cluster, [f"{key}={values[key]}" for key in keys])
    _say_what_was_read(source, number, keys)
    for note in notes:
        say(f"note: {note}", err=True)
    return name, text


def _setting(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals or not name:
        raise UserError(f"init --from: --set {word!a} is no NAME=VALUE; write --set NAME=VALUE")
    return name, value


def _recipe_keys(names: Iterable[str], source: RecipeSource) -> list[str]:
    """Return the settings that are keys of the recipe: those with a dot, and its own names where the script has no such
    variable."""
    variables = {unset.name for unset in source.unset}
    return [name for name in names if "." in name or (name in KEYS and name not in variables)]


def _ask(source: RecipeSource) -> dict[str, str]:
    """Ask for the variables without a value; an empty answer leaves one as it is."""
    values = {}
    for unset in source.unset:
        question = f"{source.path}:{unset.line}: ${unset.name} has no value here; value (Enter to leave it out)"
        answer = click.prompt(question, default="", show_default=False, err=True)
        if answer:
            values[unset.name] = answer
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
    if reading.not_rendered is not None:
        say(f"note: the recipe can be checked and not submitted: {reading.not_rendered}", err=True)
