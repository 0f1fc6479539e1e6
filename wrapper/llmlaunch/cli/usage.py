"""What a mistyped command line most likely meant: a command, an option, or a key of the recipe written as an option."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

from llmlaunch.documents.likely_meaning import listed, nearest, read_vocabulary
from llmlaunch.rundir.values import shortened, to_type

_NO_COMMAND = re.compile(r"No such command '(?P<name>.*?)'")
RECIPE_SUFFIXES = (".yaml", ".yml")
# what other tools call our commands
COMMANDS_MEANT = {
    "help": "--help",
    "version": "--version",
    "new": "init",
    "create": "init",
    "validate": "check",
    "lint": "check",
    "estimate": "check",
    "predict": "check",
    "search": "plan",
    "run": "submit",
    "launch": "submit",
    "train": "submit",
    "start": "submit",
    "sbatch": "submit",
    "list": "runs",
    "ls": "runs",
    "queue": "status",
    "squeue": "status",
    "watch": "status --watch",
    "tail": "logs",
    "log": "logs",
    "stop": "cancel",
    "kill": "cancel",
    "scancel": "cancel",
    "restart": "resume",
    "retry": "resume",
    "explain": "explain-args",
}
# what an argument that is missing may be
ARGUMENTS = {
    "RECIPE": ("recipe.yaml", "`llmlaunch init` writes a recipe"),
    "RUN": ("last", "`llmlaunch runs` lists the runs, and last is the newest"),
    "FILE": ("FILE", ""),
}


def usage_sentence(error: click.ClickException, words: Sequence[str]) -> str | None:
    """Return what is to be said instead of click's own message for a command line of these `words`; None where click
    says it well."""
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return None
    unknown = _NO_COMMAND.match(error.message)
    if unknown is not None and isinstance(error.ctx.command, click.Group):
        return _unknown_command(error.ctx, error.ctx.command, unknown["name"], words)
    if isinstance(error, click.NoSuchOption):
        return _unknown_option(error.ctx, error.option_name, words)
    if isinstance(error, click.MissingParameter) and error.param is not None:
        return _missing(error.ctx, error.param)
    return None


def _path(context: click.Context) -> list[str]:
    """Return the words of the command, such as `calibrate list`; click puts the program's own before them."""
    if context.parent is None:
        return []
    return [*_path(context.parent), str(context.info_name)]


def _missing(context: click.Context, parameter: click.Parameter) -> str | None:
    """Return what a command lacks, with an example."""
    path = _path(context)
    if isinstance(parameter, click.Option):
        option, help_text = max(parameter.opts, key=len), (parameter.help or "").rstrip(".")
        shown = f" ({help_text})" if help_text else ""
        return f"{' '.join(path)}: needs {option} {parameter.metavar or option.lstrip('-').upper()}{shown}"
    wanted = parameter.make_metavar(context)
    kind = re.match(r"[A-Z]*", wanted)[0]  # type: ignore[index]  # it matches any text
    example, where = ARGUMENTS.get(kind, (kind, ""))
    return f"{' '.join(path)}: name a {kind}: {to_type(*path, example)}{f'; {where}' if where else ''}"


def _unknown_command(context: click.Context, group: click.Group, name: str, words: Sequence[str]) -> str:
    shown = shortened(name)
    if name.endswith(RECIPE_SUFFIXES):
        return f"{shown}: a command stands before the recipe; did you mean: {to_type('check', *words)}"
    names = group.list_commands(context)
    path = _path(context)
    near = [COMMANDS_MEANT[name]] if name in COMMANDS_MEANT and not path else nearest(name, names)
    if near:
        return f"no command {shown!r}; did you mean: {to_type(*path, *near[0].split(), *_after(name, words))}"
    return f"no command {shown!r}; known: {listed(names)} ({to_type(*path, '--help')})"


def _after(name: str, words: Sequence[str]) -> list[str]:
    """Return the words of the command line behind the first that is `name`."""
    return list(words[words.index(name) + 1 :]) if name in words else []


def _unknown_option(context: click.Context, option: str, words: Sequence[str]) -> str:
    command = context.command
    path = " ".join(_path(context))
    begin = f"{path}: there is no option {shortened(option)}" if path else f"there is no option {shortened(option)}"
    if any(parameter.name == "overrides" for parameter in command.params):
        key = _key_meant(option)
        if key is not None:
            return f"{begin}; a key of the recipe is written without dashes: {key}={_value(option, words)}"
    options = [
        name
        for parameter in command.get_params(context)
        if isinstance(parameter, click.Option)
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("--")
    ]
    near = nearest(option, options)
    return f"{begin}; {f'did you mean {near[0]}?' if near else f'known: {listed(options)}'}"


def _key_meant(option: str) -> str | None:
    """Return the dotted key of a recipe that an option stands for; None where it stands for none, or for several."""
    from llmlaunch.documents.keys import dotted_keys
    from llmlaunch.documents.slurm_options import option_forms
    from llmlaunch.recipe.types import VOCABULARY, recipe_form

    name = option.lstrip("-").partition("=")[0]
    known = dotted_keys(recipe_form())
    if name.replace("-", "_") in known:
        return name.replace("-", "_")
    meant = read_vocabulary(VOCABULARY).keys_meant(name, known)
    if len(meant) == 1:
        return meant[0]
    return f"slurm.{name}" if not meant and name in option_forms("sbatch")[0] else None


def _value(option: str, words: Sequence[str]) -> str:
    """Return the value that the command line gives an option, with `=` or in the next word."""
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == option and equals:
            return shortened(value)
        if name == option and i + 1 < len(words) and not words[i + 1].startswith("-"):
            return shortened(words[i + 1])
    return "VALUE"
